// A simulated accelerator: two devices made of host memory, as torch's PrivateUse1.
//
// Operators run on the CPU's kernels, at once, on the device's own bytes. Simulated is what a program can get wrong:
// tensors of two devices, waiting for the device, the order of streams, the life of memory, and how much of it there
// is. The order is judged by vector clocks: an access is ordered after another if a chain of events, stream order and
// host synchronisation leads to it, whatever happened to run first. Copies from and to pinned memory move their bytes
// as late as the order allows.
//
// Refused: sparse and nested tensors, operators that return a view and are not registered here, distributed work.

#include <ATen/ATen.h>
#include <ATen/CPUFunctions.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <array>
#include <chrono>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

namespace simulated {

using namespace at;
using c10::CachingDeviceAllocator::DeviceStats;

constexpr auto SIMU = DeviceType::PrivateUse1;
constexpr int DEVICES = 2;
constexpr int POOL = 32;                  // streams besides the default one; CUDA reuses as many, round-robin
constexpr size_t GRANULE = 512;           // CUDA's caching allocator rounds every allocation up to it
constexpr unsigned char POISON = 0xff;    // NaN in every floating-point type, -1 in every signed one

// ---- reports --------------------------------------------------------------------------------------------------------
//
// The GIL is never taken while the lock is held, since a thread that holds the GIL may free a tensor, which takes the
// lock. So reports wait in a queue of their thread until it has let go of the lock.

struct Report { std::string kind, what, place; };

std::recursive_mutex mutex;
thread_local int locks = 0;
thread_local std::vector<Report> unsent;
PyObject* on_report = nullptr;  // (kind, what, place); an empty place is the running line
PyObject* running_line = nullptr;

bool python_runs() { return Py_IsInitialized() && !_Py_IsFinalizing(); }

void send_reports() noexcept {
  auto reports = std::move(unsent);
  unsent.clear();
  if (reports.empty() || !on_report || !python_runs()) return;
  py::gil_scoped_acquire gil;
  py::error_scope keep;  // memory may be freed while an exception is under way
  for (const auto& it : reports) {
    PyObject* result = PyObject_CallFunction(on_report, "sss", it.kind.c_str(), it.what.c_str(), it.place.c_str());
    if (!result) PyErr_WriteUnraisable(on_report);
    Py_XDECREF(result);
  }
}

struct Lock {
  Lock() { mutex.lock(); ++locks; }
  ~Lock() {
    const bool last = --locks == 0;
    mutex.unlock();
    if (last) send_reports();
  }
};

void report(std::string kind, std::string what, std::string place = "") {
  Lock lock;
  unsent.push_back({std::move(kind), std::move(what), std::move(place)});
}

// The project's line that is running; not to be called under the lock.
std::string line() {
  if (!running_line || !python_runs()) return "";
  py::gil_scoped_acquire gil;
  return py::str(py::handle(running_line)());
}

// ---- clocks ---------------------------------------------------------------------------------------------------------

using Clock = std::array<uint64_t, DEVICES * (1 + POOL)>;  // for each stream, the number of its last operation known

std::array<Clock, DEVICES * (1 + POOL)> clocks;  // what each stream's next operation comes after, itself included
Clock host;                                      // what the host knows to be done, in any of its threads
std::map<std::string, int64_t> issued;           // the number of calls of each operator

thread_local int current_device = 0;
thread_local std::array<int64_t, DEVICES> current_streams{};

int number(int device, int64_t stream) { return device * (1 + POOL) + static_cast<int>(stream); }
int number(const Stream& stream) { return number(stream.device_index(), stream.id()); }
int current_stream(int device) { return number(device, current_streams[device]); }

std::string name_of(int stream) {
  return "stream " + std::to_string(stream % (1 + POOL)) + " of simu:" + std::to_string(stream / (1 + POOL));
}

void join(Clock& clock, const Clock& other) {
  for (size_t i = 0; i < clock.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

uint64_t next_time(int stream) {
  join(clocks[stream], host);
  return ++clocks[stream][stream];
}

// ---- memory ---------------------------------------------------------------------------------------------------------

struct Access {
  int stream = 0;
  uint64_t time = 0;
  const char* by = "";
  bool before(int other) const { return time <= clocks[other][stream]; }
};

struct Block {
  size_t size;
  int device, stream;  // the stream that was current at its allocation, in whose order the memory is reused
  Access written;
  std::map<int, Access> read;  // the last one of each stream since the last write
  std::set<int> recorded;
  size_t rounded() const { return (size + GRANULE - 1) / GRANULE * GRANULE; }
};

struct Outstanding {  // freed, but a recorded stream may still use it
  size_t size;
  int device;
  std::map<int, uint64_t> until;
};

struct Copy {  // between pinned and device memory, not known to the host as done
  bool up;
  int stream;
  uint64_t time;
  char* target;
  const char* source;
  size_t size, hash;
  std::string place;
  std::string kept;  // the source of a copy down, and that of a copy up whose pinned memory was freed or used again
  bool delivered = false;

  void keep() {
    kept.assign(source, size);
    source = kept.data();
  }
};

struct Pinned { size_t current = 0, peak = 0; };

const char* const ALLOCATION = "an allocation";

std::unordered_map<const void*, Block> blocks;
std::list<Outstanding> outstanding;
std::list<Copy> copies;
std::map<const char*, size_t> pinned;
Pinned pinned_bytes, pinned_rounded;
std::array<DeviceStats, DEVICES> stats;
std::array<size_t, DEVICES> capacity{size_t{1} << 40, size_t{1} << 40};
thread_local const char* issuing = nullptr;  // the operator that allocates its outputs

size_t hash_of(const char* bytes, size_t size) { return std::hash<std::string_view>{}({bytes, size}); }
bool within(const void* pointer, const char* begin, size_t size) { return pointer >= begin && pointer < begin + size; }

Block* block_of(const Tensor& tensor) {
  const auto found = blocks.find(tensor.storage().data());
  return found == blocks.end() ? nullptr : &found->second;
}

void report_race(const std::string& by, const char* verb, int stream, const Access& before, const char* did) {
  if (before.by == ALLOCATION)
    return report("race", by + " on " + name_of(stream) + " " + verb + " memory of " + name_of(before.stream) +
                              ", without waiting for that memory's earlier uses there");
  report("race", by + " on " + name_of(stream) + " " + verb + " what " + before.by + " on " + name_of(before.stream) +
                     " " + did + ", without waiting for it");
}

void deliver(Copy& copy) {
  if (!copy.delivered) memcpy(copy.target, copy.source, copy.size);
  copy.delivered = true;
}

void access(const void* begin, Block& block, const Access& now, bool writes) {
  for (auto& copy : copies)
    if (copy.up && within(copy.target, static_cast<const char*>(begin), block.size) &&
        copy.time <= clocks[now.stream][copy.stream])
      deliver(copy);
  const char* verb = writes ? "writes" : "reads";
  if (!block.written.before(now.stream)) report_race(now.by, verb, now.stream, block.written, "writes");
  if (!writes) {
    block.read[now.stream] = now;
    return;
  }
  for (const auto& [_, read] : block.read)
    if (!read.before(now.stream)) report_race(now.by, verb, now.stream, read, "reads");
  block.read.clear();
  block.written = now;
}

void set_active(int device, size_t more, size_t less) {
  auto& all = stats[device];
  all.active_bytes[0].increase(more);
  all.active_bytes[0].decrease(less);
  const auto active = all.active_bytes[0].current, reserved = all.reserved_bytes[0].current;
  if (active > reserved) all.reserved_bytes[0].increase(active - reserved);
}

void host_learns(const Clock& clock) {
  join(host, clock);
  for (auto copy = copies.begin(); copy != copies.end();) {
    if (copy->time > host[copy->stream]) { ++copy; continue; }
    deliver(*copy);
    if (copy->up && hash_of(copy->source, copy->size) != copy->hash)
      report("race", "pinned memory changed before its copy to the device was done", copy->place);
    copy = copies.erase(copy);
  }
  for (auto it = outstanding.begin(); it != outstanding.end();) {
    std::erase_if(it->until, [](const auto& use) { return use.second <= host[use.first]; });
    if (!it->until.empty()) { ++it; continue; }
    set_active(it->device, 0, it->size);
    it = outstanding.erase(it);
  }
}

void wait_for(const std::string& kind, const std::string& what, const Clock& clock) {
  Lock lock;
  host_learns(clock);
  report(kind, what);
}

// What CUDA's allocator does before it gives up: it waits for the recorded streams, and returns cached memory.
void make_room(int device, size_t size) {
  auto& all = stats[device];
  const auto fits = [&] { return all.active_bytes[0].current + size <= capacity[device]; };
  if (static_cast<size_t>(std::max(all.active_bytes[0].current, all.reserved_bytes[0].current)) + size <=
      capacity[device]) return;
  if (!fits()) {
    size_t freed = 0;
    std::erase_if(outstanding, [&](const Outstanding& it) {
      if (it.device == device) freed += it.size;
      return it.device == device;
    });
    set_active(device, 0, freed);
    if (freed) report("allocator-wait", "for " + std::to_string(freed) + " bytes that other streams may still use");
  }
  const auto cached = all.reserved_bytes[0].current - all.active_bytes[0].current;
  all.reserved_bytes[0].decrease(cached);
  ++all.num_alloc_retries;
  if (fits()) return;
  ++all.num_ooms;
  C10_THROW_ERROR(OutOfMemoryError, "simu out of memory. Tried to allocate " + std::to_string(size) + " bytes. simu:" +
      std::to_string(device) + " has a capacity of " + std::to_string(capacity[device]) + " bytes, of which " +
      std::to_string(all.active_bytes[0].current) + " are active.");
}

struct DeviceMemory final : c10::DeviceAllocator {
  DataPtr allocate(size_t size) override {
    const int device = current_device;
    if (!size) return {nullptr, nullptr, &free_block, Device(SIMU, device)};
    Lock lock;
    const int stream = current_stream(device);
    // Its memory may be that of an earlier tensor which the allocating stream still uses.
    Block block{size, device, stream, {stream, clocks[stream][stream], issuing ? issuing : ALLOCATION}, {}, {}};
    make_room(device, block.rounded());
    void* memory = nullptr;
    TORCH_CHECK(!posix_memalign(&memory, GRANULE, block.rounded()), "the host is out of memory");
    memset(memory, POISON, block.rounded());
    stats[device].allocation[0].increase(1);
    stats[device].allocated_bytes[0].increase(block.rounded());
    stats[device].requested_bytes[0].increase(size);
    set_active(device, block.rounded(), 0);
    blocks.emplace(memory, std::move(block));
    return {memory, memory, &free_block, Device(SIMU, device)};
  }

  static void free_block(void* memory) {
    if (!memory) return;
    Lock lock;
    const auto found = blocks.find(memory);
    const Block& block = found->second;
    check_uses(block);
    for (auto& copy : copies)
      if (copy.up && within(copy.target, static_cast<char*>(memory), block.size)) copy.delivered = true;
    stats[block.device].allocation[0].decrease(1);
    stats[block.device].allocated_bytes[0].decrease(block.rounded());
    stats[block.device].requested_bytes[0].decrease(block.size);
    Outstanding left{block.rounded(), block.device, {}};
    for (const int stream : block.recorded)
      if (stream != block.stream && clocks[stream][stream] > host[stream]) left.until[stream] = clocks[stream][stream];
    if (left.until.empty()) set_active(block.device, 0, block.rounded());
    else outstanding.push_back(std::move(left));
    memset(memory, POISON, block.rounded());
    blocks.erase(found);
    free(memory);
  }

  // The next tensor in this memory is ordered after the allocating stream, and after the recorded ones.
  static void check_uses(const Block& block) {
    const auto check = [&](const Access& use, const char* did) {
      if (use.before(block.stream) || use.time <= host[use.stream] || block.recorded.count(use.stream)) return;
      report_race("freeing memory", "reuses", block.stream, use, did);
    };
    check(block.written, "writes");
    for (const auto& [_, read] : block.read) check(read, "reads");
  }

  void recordStream(const DataPtr& memory, Stream stream) override {
    Lock lock;
    const auto found = blocks.find(memory.get());
    if (found != blocks.end()) found->second.recorded.insert(number(stream));
  }

  DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* target, const void* source, size_t size) const override { memcpy(target, source, size); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    Lock lock;
    for (auto& it : stats) it.reserved_bytes[0].decrease(it.reserved_bytes[0].current - it.active_bytes[0].current);
  }
  DeviceStats getDeviceStats(DeviceIndex device) override { Lock lock; return stats[device]; }
  template <class Change> void for_each_stat(DeviceIndex device, Change change) {
    Lock lock;
    auto& all = stats[device];
    for (auto* stat : {&all.allocation, &all.allocated_bytes, &all.active_bytes, &all.reserved_bytes,
                       &all.requested_bytes}) change((*stat)[0]);
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    for_each_stat(device, [](auto& stat) { stat.reset_accumulated(); });
  }
  void resetPeakStats(DeviceIndex device) override { for_each_stat(device, [](auto& stat) { stat.reset_peak(); }); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    Lock lock;
    return {capacity[device] - stats[device].reserved_bytes[0].current, capacity[device]};
  }
};

DeviceMemory device_memory;
REGISTER_ALLOCATOR(SIMU, &device_memory);

struct PinnedMemory final : c10::Allocator {
  static size_t power_of_two(size_t size) { return std::bit_ceil(size); }  // as CUDA's caching host allocator rounds

  DataPtr allocate(size_t size) override {
    void* memory = nullptr;
    if (size) {
      Lock lock;
      TORCH_CHECK(!posix_memalign(&memory, GRANULE, size), "the host is out of memory");
      pinned[static_cast<char*>(memory)] = size;
      for (auto [counter, more] : {std::pair{&pinned_bytes, size}, {&pinned_rounded, power_of_two(size)}}) {
        counter->current += more;
        counter->peak = std::max(counter->peak, counter->current);
      }
    }
    return {memory, memory, &free_pinned, Device(DeviceType::CPU)};
  }

  // CUDA's allocator keeps freed memory until the copies that use it are done.
  static void free_pinned(void* memory) {
    if (!memory) return;
    Lock lock;
    const auto found = pinned.find(static_cast<char*>(memory));
    copies.remove_if([&](Copy& copy) {
      if (copy.up && within(copy.source, found->first, found->second)) copy.keep();
      return !copy.up && within(copy.target, found->first, found->second);
    });
    pinned_bytes.current -= found->second;
    pinned_rounded.current -= power_of_two(found->second);
    pinned.erase(found);
    free(memory);
  }

  DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* target, const void* source, size_t size) const override { memcpy(target, source, size); }
};

PinnedMemory pinned_memory;

bool is_pinned(const void* pointer) {
  Lock lock;
  auto after = pinned.upper_bound(static_cast<const char*>(pointer));
  return after != pinned.begin() && within(pointer, std::prev(after)->first, std::prev(after)->second);
}

// ---- streams and events ---------------------------------------------------------------------------------------------

// For tests of the device: `wait_event` that does nothing, on the default streams or on the others, where the running
// line begins with this text.
std::array<std::string, 2> broken_waits;

bool is_broken_wait(const Stream& stream) {
  const auto& place = broken_waits[stream.id() == 0];
  return !place.empty() && line().starts_with(place);
}

struct Event {
  Clock clock;
  std::chrono::steady_clock::time_point at;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static int index(const Device& device) { return device.has_index() ? device.index() : current_device; }
  static Stream stream(const Device& device, int64_t id) {
    return Stream(Stream::UNSAFE, Device(SIMU, static_cast<DeviceIndex>(index(device))), id);
  }

  DeviceType type() const override { return SIMU; }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  Device getDevice() const override { return Device(SIMU, static_cast<DeviceIndex>(current_device)); }
  void setDevice(Device device) const override {
    TORCH_CHECK(index(device) < DEVICES, "invalid device ordinal");
    current_device = index(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = index(device); }
  Device exchangeDevice(Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }

  Stream getStream(Device device) const override { return stream(device, current_streams[index(device)]); }
  Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  Stream getNewStream(Device device, int = 0) const override {
    static std::array<std::atomic<int64_t>, DEVICES> made;
    return stream(device, 1 + made[index(device)]++ % POOL);
  }
  Stream getStreamFromGlobalPool(Device device, bool = false) const override { return getNewStream(device); }
  Stream exchangeStream(Stream stream) const override {
    const auto before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void recordDataPtrOnStream(const DataPtr& memory, const Stream& stream) const override {
    device_memory.recordStream(memory, stream);
  }

  void record(void** event, const Stream& stream, DeviceIndex, EventFlag) const override {
    Lock lock;
    if (!*event) *event = new Event;
    const int i = number(stream);
    next_time(i);
    *static_cast<Event*>(*event) = {clocks[i], std::chrono::steady_clock::now()};
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void block(void* event, const Stream& stream) const override {
    if (is_broken_wait(stream)) return;
    Lock lock;
    if (event) join(clocks[number(stream)], static_cast<Event*>(event)->clock);
  }
  void synchronizeEvent(void* event) const override {
    if (event) wait_for("synchronize", "event", static_cast<Event*>(event)->clock);
  }
  void synchronizeStream(const Stream& stream) const override {
    wait_for("synchronize", "stream", clocks[number(stream)]);
  }
  void synchronizeDevice(DeviceIndex device) const override {
    Lock lock;
    Clock all{};
    for (int stream = 0; stream <= POOL; ++stream) join(all, clocks[number(device, stream)]);
    wait_for("synchronize", "device", all);
  }
  // Work is always done when somebody asks; from then on the host knows it.
  bool queryEvent(void* event) const override {
    Lock lock;
    if (event) host_learns(static_cast<Event*>(event)->clock);
    return true;
  }
  bool queryStream(const Stream& stream) const override {
    Lock lock;
    host_learns(clocks[number(stream)]);
    return true;
  }
  double elapsedTime(void* begin, void* end, DeviceIndex) const override {
    TORCH_CHECK(begin && end, "both events must be recorded");
    const auto time = static_cast<Event*>(end)->at - static_cast<Event*>(begin)->at;
    return std::chrono::duration<double, std::milli>(time).count();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct OnDevice {
  int before = current_device;
  explicit OnDevice(const Device& device) { current_device = Guard::index(device); }
  ~OnDevice() { current_device = before; }
};

// ---- random numbers -------------------------------------------------------------------------------------------------

struct DeviceGenerator final : c10::GeneratorImpl {  // the CPU's generator, under the device's name
  Generator cpu = at::detail::createCPUGenerator();

  explicit DeviceGenerator(int device)
      : GeneratorImpl(Device(SIMU, static_cast<DeviceIndex>(device)), DispatchKeySet(DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { cpu.set_offset(offset); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device().index());
    copy->cpu = cpu.clone();
    return copy;
  }
};

const Generator& default_generator(int device) {
  static std::array<Generator, DEVICES> generators{make_generator<DeviceGenerator>(0),
                                                   make_generator<DeviceGenerator>(1)};
  return generators[device];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  static int index(DeviceIndex device) { return device < 0 ? current_device : device; }

  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  void setCurrentDevice(DeviceIndex device) const override { current_device = device; }
  DeviceIndex getCurrentDevice() const override { return static_cast<DeviceIndex>(current_device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return static_cast<DeviceIndex>(std::exchange(current_device, device));
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(index(device)); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  const Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(index(device)); }
  Generator getNewGenerator(DeviceIndex device = -1) const override {
    return make_generator<DeviceGenerator>(index(device));
  }
  Device getDeviceFromPtr(void*) const override { return Device(SIMU, static_cast<DeviceIndex>(current_device)); }
  void resizePrivateUse1Bytes(const Storage& storage, size_t size) const override {
    OnDevice on(storage.device());
    native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), size);
  }
};

// ---- operators on the device's bytes --------------------------------------------------------------------------------

struct Operand {
  Tensor tensor;
  bool written = false, index = false;
};
using Operands = std::vector<Operand>;

Tensor host_bytes(const Tensor& tensor) {  // the same bytes as a tensor of the CPU
  if (!tensor.defined() || tensor.is_cpu()) return tensor;
  auto* begin = const_cast<char*>(static_cast<const char*>(tensor.storage().data()));
  if (begin) begin += tensor.storage_offset() * tensor.element_size();
  auto bytes = from_blob(begin, tensor.sizes(), tensor.strides(), TensorOptions().dtype(tensor.scalar_type()));
  bytes._set_conj(tensor.is_conj());
  bytes._set_neg(tensor.is_neg());
  return bytes;
}

[[noreturn]] void refuse_devices(const std::string& name, const std::string& first, const std::string& second) {
  report("mixed", name + ": " + first + " and " + second);
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", first,
              " and ", second, "! (in ", name, ")");
}

// The device of all operands; CUDA's operators also take scalars and indices of the CPU, but write to neither.
std::optional<Device> common_device(const std::string& name, const Operands& operands) {
  std::optional<Device> device;
  for (const auto& [tensor, written, index] : operands) {
    if (!tensor.defined() || tensor.is_cpu()) continue;
    TORCH_CHECK(tensor.device().type() == SIMU, name, ": a tensor of ", tensor.device());
    if (device && *device != tensor.device()) refuse_devices(name, device->str(), tensor.device().str());
    device = tensor.device();
  }
  for (const auto& [tensor, written, index] : operands) {
    if (!device || !tensor.defined() || !tensor.is_cpu() || (tensor.dim() == 0 && !written)) continue;
    if (!index) refuse_devices(name, device->str(), "cpu");
    wait_for("upload", "an index on the CPU, in " + name, clocks[current_stream(device->index())]);
  }
  return device;
}

// Puts an operator on the current stream of its device.
void issue(const char* name, const Operands& operands, const Device& device) {
  Lock lock;
  const int stream = current_stream(device.index());
  const Access now{stream, next_time(stream), name};
  ++issued[name];
  for (const bool writes : {false, true})  // what is read and written is accessed once, as written
    for (const auto& operand : operands)
      if (operand.written == writes && operand.tensor.defined())
        if (auto* block = block_of(operand.tensor)) access(operand.tensor.storage().data(), *block, now, writes);
}

Device launch(const char* name, const Operands& operands) {
  const auto device = common_device(name, operands);
  TORCH_CHECK(device, name, " has no tensor on a device");
  issue(name, operands, *device);
  return *device;
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  OnDevice on(device.value_or(Device(SIMU)));
  return at::detail::empty_strided_generic(size, stride, &device_memory, DispatchKeySet(DispatchKey::PrivateUse1),
                                           dtype_or_default(dtype));
}

Tensor empty(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device,
             std::optional<bool>, std::optional<MemoryFormat> format) {
  OnDevice on(device.value_or(Device(SIMU)));
  return at::detail::empty_generic(size, &device_memory, DispatchKeySet(DispatchKey::PrivateUse1),
                                   dtype_or_default(dtype), format);
}

struct Issuing {  // names the operator in the outputs that it allocates
  const char* before = issuing;
  explicit Issuing(const char* name) { issuing = name; }
  ~Issuing() { issuing = before; }
};

Tensor to_device(const char* name, Tensor result, const Device& device) {
  if (!result.defined()) return result;
  Issuing by(name);
  result = result.resolve_conj().resolve_neg();
  if (!result.is_non_overlapping_and_dense()) result = result.contiguous();
  auto output = empty_strided(result.sizes(), result.strides(), result.scalar_type(), {}, device, {});
  if (result.numel()) memcpy(output.data_ptr(), result.data_ptr(), result.nbytes());
  return output;
}

struct BelowAutograd {
  AutoDispatchBelowADInplaceOrView no_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{DispatchKeySet(DispatchKey::AutocastCPU)};
};

// ---- every operator without a function of its own -------------------------------------------------------------------

const std::set<std::string> SHAPED_BY_DATA = {
    "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_consecutive",
    "aten::unique_dim", "aten::unique_dim_consecutive", "aten::bincount", "aten::equal", "aten::repeat_interleave"};
const std::set<std::string> INDEXING = {
    "aten::index", "aten::_unsafe_index", "aten::_index_put_impl_", "aten::index_put", "aten::_unsafe_index_put"};

class Fallback {
 public:
  Fallback(const OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), name_(op.schema().name()), stack_(stack), first_(stack->size() - op.schema().arguments().size()) {
    for (size_t i = 0; i < op.schema().arguments().size(); ++i) collect(op.schema().arguments()[i], value(i));
  }

  void run() {
    const auto found = common_device(name_, operands_);
    device_ = found ? *found : Guard().getDevice();
    if (!found)
      for (const auto& value : given_)
        if (value.isDevice()) device_ = Device(SIMU, static_cast<DeviceIndex>(Guard::index(value.toDevice())));
    issue(name_.c_str(), operands_, device_);
    if (waits()) wait_for("shape", name_, clocks[current_stream(device_.index())]);
    for (size_t i = 0; i < given_.size(); ++i) value(i) = on_host(op_.schema().arguments()[i], value(i));
    {
      BelowAutograd guard;
      op_.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack_);
      for (const auto& [output, twin] : resized_) resize(output, twin);
      for (size_t i = 0; i < op_.schema().returns().size(); ++i) give_back(i);
    }
  }

 private:
  IValue& value(size_t i) { return (*stack_)[first_ + i]; }

  void collect(const Argument& argument, const IValue& value) {
    const bool written = argument.alias_info() && argument.alias_info()->isWrite();
    const bool index = argument.name() == "indices" && INDEXING.count(name_);
    given_.push_back(value);
    for_each_tensor(value, [&](const Tensor& tensor) { operands_.push_back({tensor, written, index}); });
  }

  template <class Function> static void for_each_tensor(const IValue& value, Function function) {
    if (value.isTensor()) function(value.toTensor());
    else if (value.isTensorList()) for (const Tensor& tensor : value.toTensorList()) function(tensor);
    else if (value.isOptionalTensorList())
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorList()) if (tensor) function(*tensor);
  }

  // Whether CUDA's operator waits for the device, because the shape of its result depends on data.
  bool waits() {
    const auto& arguments = op_.schema().arguments();
    if (INDEXING.count(name_)) {
      // `x[mask] = 0` becomes masked_fill_. On CUDA only for a scalar of the CPU, but Python makes one for CUDA alone.
      const bool fills = arguments.size() > 2 && given_[2].isTensor() && given_[2].toTensor().numel() == 1;
      return !fills && std::any_of(operands_.begin(), operands_.end(), [](const Operand& it) {
        return it.index && it.tensor.defined() && !it.tensor.is_cpu() &&
            (it.tensor.scalar_type() == kBool || it.tensor.scalar_type() == kByte);
      });
    }
    if (name_ == "aten::repeat_interleave" && !given_.back().isNone()) return false;  // output_size is given
    return SHAPED_BY_DATA.count(name_) != 0;
  }

  IValue on_host(const Argument& argument, const IValue& value) {
    const bool written = argument.alias_info() && argument.alias_info()->isWrite();
    if (value.isTensor()) return twin(value.toTensor(), written);
    if (value.isTensorList()) {
      c10::List<Tensor> twins;
      for (const Tensor& tensor : value.toTensorList()) twins.push_back(twin(tensor, written));
      return twins;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> twins;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorList())
        twins.push_back(tensor ? std::optional(twin(*tensor, written)) : tensor);
      return twins;
    }
    if (value.isDevice()) return Device(kCPU);
    if (value.isGenerator()) return generator(value.toGenerator());
    const auto optional = argument.type()->cast<OptionalType>();
    if (value.isNone() && optional && *optional->getElementType() == *GeneratorType::get())
      return generator(default_generator(device_.index()));
    return value;
  }

  Tensor twin(const Tensor& tensor, bool written) {
    if (!tensor.defined() || tensor.is_cpu()) return tensor;
    if (written && !tensor.numel()) {  // an output that the operator may resize
      resized_.emplace_back(tensor, at::empty(tensor.sizes(), tensor.options().device(kCPU)));
      return resized_.back().second;
    }
    twins_.push_back(host_bytes(tensor));
    return twins_.back();
  }

  Generator generator(const Generator& given) const {
    if (given.device().type() != SIMU) report("mixed", name_ + ": a generator of the CPU");
    TORCH_CHECK(given.device().type() == SIMU, "Expected a 'simu' device type for generator but found '",
                given.device().type(), "'");
    return static_cast<DeviceGenerator*>(given.unsafeGetGeneratorImpl())->cpu;
  }

  static void resize(const Tensor& output, const Tensor& twin) {
    if (!twin.numel()) return;
    output.resize_(twin.sizes());
    host_bytes(output).copy_(twin);
  }

  void give_back(size_t i) {
    const auto& schema = op_.schema();
    IValue& result = (*stack_)[stack_->size() - schema.returns().size() + i];
    const auto* alias = schema.returns()[i].alias_info();
    for (size_t j = 0; alias && j < given_.size(); ++j) {
      const auto* other = schema.arguments()[j].alias_info();
      if (!other || !(*other == *alias)) continue;
      result = given_[j];
      return;
    }
    if (result.isTensor()) result = output(result.toTensor());
    else if (result.isTensorList()) {
      c10::List<Tensor> outputs;
      for (const Tensor& tensor : result.toTensorList()) outputs.push_back(output(tensor));
      result = outputs;
    }
  }

  Tensor output(const Tensor& result) const {
    for (const auto& twin : twins_)
      TORCH_CHECK(!result.defined() || !result.is_alias_of(twin), name_, " returns a view, which is not simulated");
    return to_device(name_.c_str(), result, device_);
  }

  const OperatorHandle& op_;
  const std::string& name_;
  torch::jit::Stack* stack_;
  const size_t first_;
  Device device_{SIMU, 0};
  std::vector<IValue> given_;
  Operands operands_;
  std::vector<Tensor> twins_;
  std::vector<std::pair<Tensor, Tensor>> resized_;
};

void fallback(const OperatorHandle& op, torch::jit::Stack* stack) { Fallback(op, stack).run(); }

// ---- copies ---------------------------------------------------------------------------------------------------------

std::string size_text(size_t size) { return std::to_string(size) + " bytes"; }

// A copy on `stream` begins to use these bytes of pinned memory. What earlier copies do there comes before.
void use_pinned(const char* begin, size_t size, int stream, bool writes) {
  for (auto copy = copies.begin(); copy != copies.end();) {
    const char* there = copy->up ? copy->source : copy->target;
    const bool shares = begin < there + copy->size && there < begin + size && (writes || !copy->up);
    if (shares && copy->time > clocks[stream][copy->stream])
      report("race", "a copy uses pinned memory that another copy uses, without waiting for it");
    if (shares && !copy->up) {
      deliver(*copy);
      copy = copies.erase(copy);
    } else {
      if (shares) copy->keep();
      ++copy;
    }
  }
}

void copy_up(const Tensor& source, const Tensor& target, bool non_blocking) {
  const auto device = launch("a copy from the host", {{target, true}});
  const int stream = current_stream(device.index());
  auto* to = static_cast<char*>(target.data_ptr());
  const auto* from = static_cast<const char*>(source.data_ptr());
  const auto size = source.nbytes();
  if (non_blocking && is_pinned(from)) {
    const auto place = line();
    Lock lock;
    use_pinned(from, size, stream, false);
    copies.push_back({true, stream, clocks[stream][stream], to, from, size, hash_of(from, size), place, ""});
    return;
  }
  memcpy(to, from, size);
  if (non_blocking) report("upload-pageable", size_text(size));
  else wait_for("upload", size_text(size), clocks[stream]);
}

void copy_down(const Tensor& source, const Tensor& target, bool non_blocking) {
  const auto device = launch("a copy to the host", {{source}});
  const int stream = current_stream(device.index());
  auto* to = static_cast<char*>(target.data_ptr());
  const auto* from = static_cast<const char*>(source.data_ptr());
  const auto size = source.nbytes();
  if (non_blocking && is_pinned(to)) {
    Lock lock;
    use_pinned(to, size, stream, true);
    copies.push_back({false, stream, clocks[stream][stream], to, nullptr, size, 0, "", std::string(from, size)});
    copies.back().source = copies.back().kept.data();
    memset(to, POISON, size);
    return;
  }
  memcpy(to, from, size);
  wait_for("download", size_text(size), clocks[stream]);
}

// CUDA's copies between devices are ordered on the current streams of both.
void copy_across(const Tensor& source, const Tensor& target) {
  Lock lock;
  const int from = current_stream(source.get_device()), to = current_stream(target.get_device());
  join(clocks[from], clocks[to]);
  issue("a copy to another device", {{source}}, source.device());
  join(clocks[to], clocks[from]);
  issue("a copy from another device", {{target, true}}, target.device());
  host_bytes(target).copy_(host_bytes(source));
}

void transfer(const Tensor& source, const Tensor& target, bool non_blocking);

// Between different types or layouts CUDA copies through temporary tensors: it converts on the device if the copy does
// not block, else on the host, and what was pinned is not in a temporary (ATen/native/cuda/Copy.cu).
void copy_through_temporaries(const Tensor& source, const Tensor& target, bool non_blocking) {
  const bool source_converts = source.is_cpu() != non_blocking;
  const auto dtype = source_converts ? target.scalar_type() : source.scalar_type();
  const bool fits = target.is_contiguous() && target.scalar_type() == dtype;
  const auto through = fits ? target : at::empty(target.sizes(), target.options().dtype(dtype));
  transfer(source.to(dtype).contiguous(), through, non_blocking);
  if (!fits) target.copy_(through, non_blocking);
}

void transfer(const Tensor& source, const Tensor& target, bool non_blocking) {
  if (!source.is_cpu() && !target.is_cpu()) {
    if (source.device() != target.device()) return copy_across(source, target);
    launch("aten::copy_", {{source}, {target, true}});
    host_bytes(target).copy_(host_bytes(source));
    return;
  }
  if (source.scalar_type() != target.scalar_type() || source.strides() != target.strides() ||
      !source.is_non_overlapping_and_dense())
    return copy_through_temporaries(source, target, non_blocking);
  source.is_cpu() ? copy_up(source, target, non_blocking) : copy_down(source, target, non_blocking);
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  BelowAutograd guard;
  if (!target.numel()) return target;
  const bool on_one = source.device() == target.device();
  transfer((on_one ? source : source.resolve_conj().resolve_neg()).expand_as(target), target, non_blocking);
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

Scalar item(const Tensor& tensor) {
  const auto device = launch("aten::item", {{tensor}});
  wait_for("item", c10::toString(tensor.scalar_type()), clocks[current_stream(device.index())]);
  return at::_local_scalar_dense(host_bytes(tensor));
}

// ---- convolution ----------------------------------------------------------------------------------------------------

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, SymIntArrayRef stride,
                   SymIntArrayRef padding, SymIntArrayRef dilation, bool transposed, SymIntArrayRef output_padding,
                   SymInt groups) {
  const char* name = "aten::convolution";
  const auto device = launch(name, {{input}, {weight}, {bias.value_or(Tensor())}});
  BelowAutograd guard;
  return to_device(name, at::convolution_symint(host_bytes(input), host_bytes(weight),
      bias ? std::optional(host_bytes(*bias)) : bias, stride, padding, dilation, transposed, output_padding, groups),
      device);
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, SymIntArrayRef stride, SymIntArrayRef padding,
    SymIntArrayRef dilation, bool transposed, SymIntArrayRef output_padding, SymInt groups, std::array<bool, 3> mask) {
  const char* name = "aten::convolution_backward";
  const auto device = launch(name, {{grad}, {input}, {weight}});
  BelowAutograd guard;
  const std::vector<SymInt> bias{transposed ? weight.sym_size(1) * groups : weight.sym_size(0)};
  const auto [of_input, of_weight, of_bias] = at::convolution_backward_symint(
      host_bytes(grad), host_bytes(input), host_bytes(weight), SymIntArrayRef(bias), stride, padding, dilation,
      transposed, output_padding, groups, mask);
  return {to_device(name, of_input, device), to_device(name, of_weight, device), to_device(name, of_bias, device)};
}

// ---- attention ------------------------------------------------------------------------------------------------------
//
// Like CUDA's flash and memory-efficient kernels, these save queries, keys, values, output and logsumexp, no logits.

int64_t choose_attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                         double dropout, bool, std::optional<double>, bool) {
  const auto plain = [](const Tensor& x) { return x.dim() == 4 && x.numel() && x.stride(-1) == 1; };
  const bool fused = plain(query) && plain(key) && plain(value) && query.size(-1) == value.size(-1) && dropout == 0 &&
      !(mask && mask->requires_grad());
  return static_cast<int64_t>(fused ? SDPBackend::overrideable : SDPBackend::math);  // codespell:ignore overrideable
}

std::optional<Tensor> host_mask(const std::optional<Tensor>& mask, const Tensor& query, const Tensor& key) {
  if (!mask || !mask->defined()) return std::nullopt;
  return host_bytes(*mask).expand({query.size(0), query.size(1), query.size(2), key.size(2)});
}

using Fused = std::tuple<Tensor, Tensor, Tensor, Tensor, SymInt, SymInt, Tensor, Tensor, Tensor>;

Fused fused_attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                      double dropout, bool is_causal, bool, std::optional<double> scale) {
  const char* name = "aten::_scaled_dot_product_fused_attention_overrideable";
  const auto device = launch(name, {{query}, {key}, {value}, {mask.value_or(Tensor())}});
  BelowAutograd guard;
  const auto [output, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(
      host_bytes(query), host_bytes(key), host_bytes(value), dropout, is_causal, host_mask(mask, query, key), scale);
  return {to_device(name, output, device), to_device(name, logsumexp, device), {}, {}, query.sym_size(2),
          key.sym_size(2), {}, {}, {}};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> fused_attention_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& mask,
    std::array<bool, 4>, const Tensor& output, const Tensor& logsumexp, const Tensor&, const Tensor&, SymInt, SymInt,
    double dropout, bool is_causal, const Tensor&, const Tensor&, std::optional<double> scale) {
  const char* name = "aten::_scaled_dot_product_fused_attention_overrideable_backward";
  const auto device = launch(name, {{grad}, {query}, {key}, {value}, {mask}, {output}, {logsumexp}});
  BelowAutograd guard;
  const auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      host_bytes(grad), host_bytes(query), host_bytes(key), host_bytes(value), host_bytes(output),
      host_bytes(logsumexp), dropout, is_causal, host_mask(mask, query, key), scale);
  return {to_device(name, of_query, device), to_device(name, of_key, device), to_device(name, of_value, device), {}};
}

// The variable-length kernel behind torch.nn.attention.varlen: rows `[tokens, heads, dim]`, of which the bounds make
// sequences. Without `bounds` CUDA's operator is another one, which nothing here calls.
class Sequences {
 public:
  Sequences(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& query_bounds,
            const std::optional<Tensor>& key_bounds, int64_t longest_query, int64_t longest_key, bool is_causal,
            int64_t left, int64_t right) : is_causal_(is_causal || right == 0) {
    for (const auto* it : {&query, &key, &value}) {
      TORCH_CHECK(it->dim() == 3 && it->stride(-1) == 1, "flash attention takes rows with a contiguous last dimension");
      TORCH_CHECK(it->scalar_type() == kHalf || it->scalar_type() == kBFloat16, "flash attention takes fp16 and bf16");
      TORCH_CHECK(it->scalar_type() == query.scalar_type(), "query, key and value must have the same dtype");
      TORCH_CHECK(it->size(2) % 8 == 0 && it->size(2) <= 256, "the head size must be a multiple of 8, at most 256");
    }
    TORCH_CHECK(query_bounds && key_bounds, "only sequences with bounds are simulated");
    TORCH_CHECK(left == -1 && (right == -1 || right == 0), "only whole and causal windows are simulated");
    queries_ = spans(*query_bounds, query.size(0), longest_query);
    keys_ = spans(*key_bounds, key.size(0), longest_key);
    TORCH_CHECK(queries_.size() == keys_.size(), "queries and keys have different numbers of sequences");
  }

  size_t size() const { return queries_.size(); }
  Tensor query(const Tensor& row, size_t i) const { return piece(row, queries_[i]); }
  Tensor key(const Tensor& row, size_t i) const { return piece(row, keys_[i]); }
  bool is_empty(size_t i) const { return !queries_[i].second || !keys_[i].second; }

  std::optional<Tensor> mask(size_t i, ScalarType dtype) const {  // aligned to the bottom right
    if (!is_causal_) return std::nullopt;
    const auto rows = queries_[i].second, columns = keys_[i].second;
    const auto visible = at::ones({rows, columns}, kBool).tril(columns - rows);
    return at::zeros({rows, columns}, dtype).masked_fill_(visible.logical_not(), -INFINITY);
  }

 private:
  using Spans = std::vector<std::pair<int64_t, int64_t>>;

  static Tensor piece(const Tensor& row, const std::pair<int64_t, int64_t>& span) {  // [1, heads, length, dim]
    return host_bytes(row).narrow(0, span.first, span.second).transpose(0, 1).unsqueeze(0);
  }

  static Spans spans(const Tensor& bounds, int64_t tokens, int64_t longest) {
    TORCH_CHECK(bounds.scalar_type() == kInt && bounds.is_contiguous(), "bounds must be contiguous int32");
    TORCH_CHECK(!bounds.is_cpu(), "bounds must be on the device");
    const auto host = host_bytes(bounds);
    const auto* bound = host.const_data_ptr<int>();
    Spans spans;
    for (int64_t i = 0; i + 1 < bounds.numel(); ++i) {
      spans.emplace_back(bound[i], bound[i + 1] - bound[i]);
      TORCH_CHECK(spans.back().second >= 0 && bound[i + 1] <= tokens, "the bounds leave the row");
      TORCH_CHECK(spans.back().second <= longest, "a sequence is longer than the longest");
    }
    return spans;
  }

  bool is_causal_;
  Spans queries_, keys_;
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> varlen_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& query_bounds,
    const std::optional<Tensor>& key_bounds, SymInt longest_query, SymInt longest_key, double dropout, bool is_causal,
    bool, std::optional<double> scale, std::optional<SymInt> left, std::optional<SymInt> right,
    const std::optional<Tensor>&, const std::optional<Tensor>&, const std::optional<Tensor>&, std::optional<int64_t>) {
  const char* name = "aten::_flash_attention_forward";
  const auto device = launch(name, {{query}, {key}, {value}, {query_bounds.value_or(Tensor())},
                                    {key_bounds.value_or(Tensor())}});
  const Sequences sequences(query, key, value, query_bounds, key_bounds, longest_query.expect_int(),
                            longest_key.expect_int(), is_causal, left ? left->expect_int() : -1,
                            right ? right->expect_int() : -1);
  BelowAutograd guard;
  Issuing by(name);
  const auto output = at::empty(query.sizes(), query.options());
  const auto logsumexp = at::empty({query.size(1), query.size(0)}, query.options().dtype(kFloat));
  for (size_t i = 0; i < sequences.size(); ++i) {
    if (sequences.is_empty(i)) { sequences.query(output, i).zero_(); continue; }
    const auto [of_sequence, sums] = at::_scaled_dot_product_flash_attention_for_cpu(
        sequences.query(query, i), sequences.key(key, i), sequences.key(value, i), dropout, false,
        sequences.mask(i, query.scalar_type()), scale);
    sequences.query(output, i).copy_(of_sequence);
    sequences.query(logsumexp.t().unsqueeze(-1), i).squeeze(-1).copy_(sums);
  }
  const auto unused = at::empty({0}, query.options());
  return {output, logsumexp, at::empty({2}, query.options().dtype(kLong)), unused, unused};
}

std::tuple<Tensor, Tensor, Tensor> varlen_attention_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& output,
    const Tensor& logsumexp, const Tensor& query_bounds, const Tensor& key_bounds, SymInt longest_query,
    SymInt longest_key, double dropout, bool is_causal, const Tensor&, const Tensor&, std::optional<double> scale,
    std::optional<SymInt> left, std::optional<SymInt> right) {
  const char* name = "aten::_flash_attention_backward";
  launch(name, {{grad}, {query}, {key}, {value}, {output}, {logsumexp}, {query_bounds}, {key_bounds}});
  const Sequences sequences(query, key, value, query_bounds, key_bounds, longest_query.expect_int(),
                            longest_key.expect_int(), is_causal, left ? left->expect_int() : -1,
                            right ? right->expect_int() : -1);
  BelowAutograd guard;
  Issuing by(name);
  const std::array<Tensor, 3> gradients{at::empty(query.sizes(), query.options()),
                                        at::empty(key.sizes(), key.options()),
                                        at::empty(value.sizes(), value.options())};
  for (const auto& gradient : gradients) host_bytes(gradient).zero_();  // of rows in no sequence, too
  for (size_t i = 0; i < sequences.size(); ++i) {
    if (sequences.is_empty(i)) continue;
    const auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        sequences.query(grad, i), sequences.query(query, i), sequences.key(key, i), sequences.key(value, i),
        sequences.query(output, i), sequences.query(logsumexp.t().unsqueeze(-1), i).squeeze(-1), dropout, false,
        sequences.mask(i, query.scalar_type()), scale);
    sequences.query(gradients[0], i).copy_(of_query);
    sequences.key(gradients[1], i).copy_(of_key);
    sequences.key(gradients[2], i).copy_(of_value);
  }
  return {gradients[0], gradients[1], gradients[2]};
}

// ---- views and storage: no work on the device -----------------------------------------------------------------------

Tensor as_strided(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride, std::optional<SymInt> offset) {
  return native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                       offset ? std::optional(offset->expect_int()) : std::nullopt);
}
Tensor view(const Tensor& self, SymIntArrayRef size) { return native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }
Tensor reshape_alias(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride) {
  return native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
const Tensor& resize(const Tensor& self, SymIntArrayRef size, std::optional<MemoryFormat> format) {
  OnDevice on(self.device());
  return native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}
Tensor& set_view(Tensor& self, Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  return at::cpu::set_(self, std::move(source), offset, size, stride);
}
Tensor& set_tensor(Tensor& self, const Tensor& source) { return at::cpu::set_(self, source); }
Tensor& set_storage(Tensor& self, Storage source) { return at::cpu::set_(self, std::move(source)); }
void record_stream(Tensor& self, Stream stream) { device_memory.recordStream(self.storage().data_ptr(), stream); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("_scaled_dot_product_fused_attention_overrideable", fused_attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", fused_attention_backward);
  m.impl("_fused_sdp_choice", choose_attention);
  m.impl("_flash_attention_forward", varlen_attention);
  m.impl("_flash_attention_backward", varlen_attention_backward);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", native::unfold);
  m.impl("view_as_real", native::view_as_real);
  m.impl("view_as_complex", native::view_as_complex);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_view);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("record_stream", record_stream);
}

// For operators with a kernel of the CPU that are also composed of others, torch would prefer the composition. CUDA has
// kernels of its own for these: what they save and allocate, and their errors, are as here.
void prefer_kernels(torch::Library& library) {
  std::unordered_set<c10::OperatorName> composed;
  const auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto key : {DispatchKey::CompositeImplicitAutograd, DispatchKey::CompositeExplicitAutograd,
                         DispatchKey::CompositeExplicitAutogradNonFunctional})
    for (const auto& name : dispatcher.getRegistrationsForDispatchKey(key)) composed.insert(name);
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(DispatchKey::CPU))
    if (name.getNamespace() == "aten" && composed.count(name))
      library.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// A lazy conjugate is materialised by a copy, which must not be asked to materialise it first.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace simulated

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &simulated::choose_attention)
}

// ---- autocast, with all that autocast_mode.cpp registers for CUDA ---------------------------------------------------

namespace at::autocast {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define TO_HALF(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define TO_FLOAT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define RESULT_IN_FLOAT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define TO_WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(TO_HALF)
  AT_FORALL_FP32(TO_FLOAT)
  AT_FORALL_FP32_SET_OPT_DTYPE(RESULT_IN_FLOAT)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(TO_WIDEST)
}

}  // namespace at::autocast

// ---- Python ---------------------------------------------------------------------------------------------------------

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace simulated;
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  prefer_kernels(library);
  m.def("listen", [](py::object report, py::object line) {
    on_report = report.release().ptr();
    running_line = line.release().ptr();
  });
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("set_capacity", [](int device, size_t size) { capacity[device] = size; });
  m.def("break_waits", [](bool default_stream, std::string place) { broken_waits[default_stream] = std::move(place); });
  m.def("issued", [] { Lock lock; return issued; });
  m.def("pinned", [] {
    Lock lock;
    return std::map<std::string, size_t>{{"pinned", pinned_bytes.current}, {"pinned_peak", pinned_bytes.peak},
        {"pinned_rounded", pinned_rounded.current}, {"pinned_rounded_peak", pinned_rounded.peak}};
  });
  m.def("reset_pinned_peak", [] {
    Lock lock;
    for (auto* counter : {&pinned_bytes, &pinned_rounded}) counter->peak = counter->current;
  });
}
