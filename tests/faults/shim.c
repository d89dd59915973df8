/* The calls of libc that read and write files: counted, failed on request, and recorded. See shim.py.

   Only files below the folders given to `shim_watch` are seen, by path, or by a descriptor that such a path gave.
   One call can fail (`shim_fail`), or that and all later ones of its kind. With a record (`shim_record`), every call
   that changes a file or folder is appended to it together with its data, in the order in which they happened. */

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define NEXT(name) ({ static __typeof__(&name) next; if (!next) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name); next; })
#define FILES 65536
#define SHORT (-1) /* in place of an errno: half of the bytes are read or written */

enum { READS = 1, CHANGES = 2, GROWS = 4 }; /* what a call does; a full disk stops only what grows */

static char roots[16][PATH_MAX];
static int root_count, error, onwards, kinds_failing, calls_fd = -1, record_fd = -1;
static long calls, failing;
static char failed[PATH_MAX + 64];
static char *path_of[FILES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* held over a call and its record */

/* ---- control, through ctypes ---- */

void shim_watch(const char *folders) {
    root_count = 0;
    for (const char *end; *folders && root_count < 16; folders = *end ? end + 1 : end) {
        end = strchrnul(folders, ':');
        snprintf(roots[root_count++], PATH_MAX, "%.*s", (int)(end - folders), folders);
    }
}

/* Fail the `n`-th call from now on, counted from 1; 0: none. `all_later`: and those after it. */
void shim_fail(long n, int number, int all_later) {
    failing = n, error = number, onwards = all_later, calls = 0, failed[0] = 0;
    kinds_failing = number == ENOSPC || number == EDQUOT ? GROWS : READS | CHANGES | GROWS;
}

/* Write the name and path of each call to a descriptor; -1: no more. */
void shim_list(int descriptor) { calls_fd = descriptor; }
void shim_record(int descriptor) { record_fd = descriptor; }
const char *shim_failed(void) { return failed; }

/* ---- what is watched ---- */

static int below_roots(const char *path) {
    for (int i = 0; i < root_count; i++) {
        size_t length = strlen(roots[i]);
        if (!strncmp(path, roots[i], length) && (path[length] == '/' || !path[length])) return 1;
    }
    return 0;
}

/* The absolute path in `full`; whether it is watched. */
static int watched(int folder, const char *path, char *full) {
    if (!root_count || !path) return 0;
    char base[PATH_MAX] = "", link[64];
    if (*path != '/') {
        snprintf(link, sizeof link, folder == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", folder);
        ssize_t length = NEXT(readlink)(link, base, sizeof base - 1);
        if (length < 0) return 0;
        base[length] = 0;
    }
    snprintf(full, PATH_MAX, *base && *path ? "%.2000s/%.2000s" : "%.2000s%.2000s", base, path);
    return below_roots(full);
}

static const char *watched_file(int file) { return file >= 0 && file < FILES ? path_of[file] : NULL; }

static int track(int file, const char *path) {
    if (file >= 0 && file < FILES) path_of[file] = strdup(path);
    return file;
}

/* Count a call; whether it has to fail, with errno set. */
static int fails(const char *call, const char *path, int kind) {
    int before = errno;
    if (calls_fd >= 0) {
        char line[PATH_MAX + 64];
        int length = snprintf(line, sizeof line, "%s %d %s\n", call, kind, path);
        if (syscall(SYS_write, calls_fd, line, length) < 0) abort();
    }
    long n = __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
    errno = before;
    if (!failing || n < failing || (n > failing && (!onwards || !(kind & kinds_failing)))) return 0;
    if (n == failing) snprintf(failed, sizeof failed, "%s %s", call, path);
    if (error == SHORT) return 0;
    errno = error;
    return 1;
}

static size_t shortened(size_t size) { return failing && calls == failing && error == SHORT && size > 1 ? size / 2 : size; }

/* ---- the record ---- */

struct event { char call; int32_t file; uint32_t path, other, size; int64_t offset; uint64_t inode; } __attribute__((packed));

static void record(char call, int file, const char *path, const char *other, int64_t offset, const void *data, size_t size) {
    if (record_fd < 0) return;
    int before = errno;
    struct stat status = {0};
    if (file >= 0) NEXT(fstat)(file, &status);
    struct event event = {call, file, strlen(path), strlen(other), size, offset, status.st_ino};
    struct iovec parts[] = {{&event, sizeof event}, {(void *)path, event.path}, {(void *)other, event.other}, {(void *)data, size}};
    if (syscall(SYS_writev, record_fd, parts, 4) < 0) abort();
    errno = before;
}

/* A remark of the program that is recorded, such as that it has reported something done. */
void shim_mark(const char *text) { record('!', -1, text, "", 0, "", 0); }

/* A call under the lock, if it is recorded. */
#define RECORDED(call) ({ if (record_fd >= 0) pthread_mutex_lock(&lock); __auto_type got = (call); got; })
#define DONE(what) do { if (record_fd >= 0) { what; pthread_mutex_unlock(&lock); } } while (0)

/* ---- opening and closing ---- */

static int opened(int (*call)(int, const char *, int, ...), int folder, const char *path, int flags, mode_t mode) {
    char full[PATH_MAX];
    if (!watched(folder, path, full)) return call(folder, path, flags, mode);
    int writes = (flags & O_ACCMODE) != O_RDONLY;
    if (fails(flags & O_CREAT ? "create" : "open", full, flags & O_CREAT ? CHANGES | GROWS : READS)) return -1;
    int file = RECORDED(call(folder, path, flags, mode));
    DONE(if (file >= 0) record(flags & O_TRUNC && writes ? 'O' : 'o', file, full, flags & O_CREAT ? "c" : "", 0, "", 0));
    return track(file, full);
}

#define MODE(flags) ({ mode_t mode = 0; if ((flags) & (O_CREAT | O_TMPFILE)) { va_list list; va_start(list, flags); mode = va_arg(list, mode_t); va_end(list); } mode; })
int open(const char *path, int flags, ...) { return opened(NEXT(openat), AT_FDCWD, path, flags, MODE(flags)); }
int open64(const char *path, int flags, ...) { return opened(NEXT(openat64), AT_FDCWD, path, flags, MODE(flags)); }
int openat(int folder, const char *path, int flags, ...) { return opened(NEXT(openat), folder, path, flags, MODE(flags)); }
int openat64(int folder, const char *path, int flags, ...) { return opened(NEXT(openat64), folder, path, flags, MODE(flags)); }
int creat(const char *path, mode_t mode) { return open(path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

FILE *fopen(const char *path, const char *mode) { /* what is written through a FILE is not seen: so it may not be used */
    char full[PATH_MAX];
    if (watched(AT_FDCWD, path, full) && fails("fopen", full, READS)) return NULL;
    return NEXT(fopen)(path, mode);
}
FILE *fopen64(const char *path, const char *mode) { return fopen(path, mode); }

int close(int file) {
    const char *path = watched_file(file);
    if (!path) return NEXT(close)(file);
    path_of[file] = NULL; /* not freed: another thread may be using it */
    int fault = fails("close", path, CHANGES), at = errno, result = NEXT(close)(file);
    return fault ? (errno = at, -1) : result;
}

DIR *opendir(const char *path) {
    char full[PATH_MAX];
    if (!watched(AT_FDCWD, path, full)) return NEXT(opendir)(path);
    if (fails("opendir", full, READS)) return NULL;
    DIR *folder = NEXT(opendir)(path);
    if (folder) track(dirfd(folder), full);
    return folder;
}
int closedir(DIR *folder) {
    int file = dirfd(folder);
    if (watched_file(file)) path_of[file] = NULL;
    return NEXT(closedir)(folder);
}
#define READDIR(name, type) type *name(DIR *folder) { \
    const char *path = watched_file(dirfd(folder)); \
    return path && fails("readdir", path, READS) ? NULL : NEXT(name)(folder); }
READDIR(readdir, struct dirent)
READDIR(readdir64, struct dirent64)

/* ---- reading and writing ---- */

#define READING(name, parameters, size, ...) ssize_t name parameters { \
    const char *path = watched_file(file); \
    if (!path) return NEXT(name)(file, __VA_ARGS__); \
    if (fails("read", path, READS)) return -1; \
    size; \
    return NEXT(name)(file, __VA_ARGS__); }
READING(read, (int file, void *data, size_t size), size = shortened(size), data, size)
READING(pread, (int file, void *data, size_t size, off_t at), size = shortened(size), data, size, at)
READING(pread64, (int file, void *data, size_t size, off64_t at), size = shortened(size), data, size, at)
READING(readv, (int file, const struct iovec *parts, int count), , parts, count)
READING(preadv, (int file, const struct iovec *parts, int count, off_t at), , parts, count, at)

/* Writing where the file is, or where it says; `at` is -1 for the former. */
static ssize_t written(int file, const void *data, size_t size, off64_t at) {
    const char *path = watched_file(file);
    if (path && fails("write", path, CHANGES | GROWS)) return -1;
    if (!path) return at < 0 ? NEXT(write)(file, data, size) : NEXT(pwrite64)(file, data, size, at);
    size = shortened(size);
    ssize_t count = RECORDED(at < 0 ? NEXT(write)(file, data, size) : NEXT(pwrite64)(file, data, size, at));
    DONE(if (count > 0) record('w', file, path, "", at < 0 ? NEXT(lseek64)(file, 0, SEEK_CUR) - count : at, data, count));
    return count;
}
ssize_t write(int file, const void *data, size_t size) { return written(file, data, size, -1); }
ssize_t pwrite(int file, const void *data, size_t size, off_t at) { return written(file, data, size, at); }
ssize_t pwrite64(int file, const void *data, size_t size, off64_t at) { return written(file, data, size, at); }
static ssize_t written_parts(int file, const struct iovec *parts, int count, off64_t at) {
    if (!watched_file(file)) return at < 0 ? NEXT(writev)(file, parts, count) : NEXT(pwritev64)(file, parts, count, at);
    ssize_t all = 0, one = 0;
    for (int i = 0; i < count && one >= 0; i++, all += one > 0 ? one : 0) {
        one = written(file, parts[i].iov_base, parts[i].iov_len, at < 0 ? -1 : at + all);
        if (one >= 0 && one < (ssize_t)parts[i].iov_len) return all + one;
    }
    return all ? all : one;
}
ssize_t writev(int file, const struct iovec *parts, int count) { return written_parts(file, parts, count, -1); }
ssize_t pwritev(int file, const struct iovec *parts, int count, off_t at) { return written_parts(file, parts, count, at); }
ssize_t pwritev64(int file, const struct iovec *parts, int count, off64_t at) { return written_parts(file, parts, count, at); }

/* Copies inside the kernel are refused, as file systems without them do: callers then read and write. */
ssize_t sendfile(int to, int from, off_t *at, size_t size) {
    if (watched_file(to)) return errno = EINVAL, -1;
    return NEXT(sendfile)(to, from, at, size);
}
ssize_t sendfile64(int to, int from, off64_t *at, size_t size) { return sendfile(to, from, at, size); }
ssize_t copy_file_range(int from, off64_t *at, int to, off64_t *to_at, size_t size, unsigned flags) {
    if (watched_file(to)) return errno = EXDEV, -1;
    return NEXT(copy_file_range)(from, at, to, to_at, size, flags);
}

#define MAPPING(name, type) void *name(void *at, size_t size, int protection, int flags, int file, type offset) { \
    const char *path = watched_file(file); \
    if (path && fails("mmap", path, READS)) return MAP_FAILED; \
    void *mapped = NEXT(name)(at, size, protection, flags, file, offset); \
    if (path && flags & MAP_SHARED && protection & PROT_WRITE) record('?', file, path, "mmap", 0, "", 0); \
    return mapped; }
MAPPING(mmap, off_t)
MAPPING(mmap64, off64_t)

/* ---- calls with a descriptor that change a file, or tell something about it ---- */

#define ON_FILE(name, parameters, what, kind, does, ...) int name parameters { \
    const char *path = watched_file(file); \
    if (!path) return NEXT(name)(file __VA_OPT__(,) __VA_ARGS__); \
    if (fails(what, path, kind)) return -1; \
    int result = RECORDED(NEXT(name)(file __VA_OPT__(,) __VA_ARGS__)); \
    DONE(if (!result) { does; }); \
    return result; }
ON_FILE(fsync, (int file), "fsync", CHANGES | GROWS, record('s', file, path, "", 0, "", 0))
ON_FILE(fdatasync, (int file), "fsync", CHANGES | GROWS, record('s', file, path, "", 0, "", 0))
ON_FILE(ftruncate, (int file, off_t size), "ftruncate", CHANGES | GROWS, record('t', file, path, "", size, "", 0), size)
ON_FILE(ftruncate64, (int file, off64_t size), "ftruncate", CHANGES | GROWS, record('t', file, path, "", size, "", 0), size)
ON_FILE(flock, (int file, int operation), "flock", READS, , operation)
ON_FILE(futimens, (int file, const struct timespec times[2]), "utime", CHANGES, , times)
ON_FILE(fstat, (int file, struct stat *status), "stat", READS, , status)
ON_FILE(fstat64, (int file, struct stat64 *status), "stat", READS, , status)
int posix_fallocate64(int file, off64_t at, off64_t size) { /* returns its error */
    const char *path = watched_file(file);
    return path && fails("fallocate", path, CHANGES | GROWS) ? errno : NEXT(posix_fallocate64)(file, at, size);
}

static int controlled(int (*call)(int, int, ...), int file, int command, void *argument) {
    const char *path = watched_file(file);
    int locks = command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK || command == F_OFD_SETLKW;
    if (path && locks && fails("flock", path, READS)) return -1;
    int result = call(file, command, argument);
    return path && (command == F_DUPFD || command == F_DUPFD_CLOEXEC) ? track(result, path) : result;
}
#define ARGUMENT(command) ({ va_list list; va_start(list, command); void *argument = va_arg(list, void *); va_end(list); argument; })
int fcntl(int file, int command, ...) { return controlled(NEXT(fcntl), file, command, ARGUMENT(command)); }
int fcntl64(int file, int command, ...) { return controlled(NEXT(fcntl64), file, command, ARGUMENT(command)); }

/* ---- calls with a path ---- */

#define ON_PATH(name, parameters, folder, what, kind, does, ...) int name parameters { \
    char full[PATH_MAX]; \
    if (!watched(folder, path, full)) return NEXT(name)(__VA_ARGS__); \
    if (fails(what, full, kind)) return -1; \
    int result = RECORDED(NEXT(name)(__VA_ARGS__)); \
    DONE(if (!result) { does; }); \
    return result; }
#define REMOVED record('u', -1, full, "", 0, "", 0)
ON_PATH(unlink, (const char *path), AT_FDCWD, "unlink", CHANGES, REMOVED, path)
ON_PATH(rmdir, (const char *path), AT_FDCWD, "rmdir", CHANGES, REMOVED, path)
ON_PATH(unlinkat, (int folder, const char *path, int flags), folder, "unlink", CHANGES, REMOVED, folder, path, flags)
#define MADE record('m', -1, full, "", 0, "", 0)
ON_PATH(mkdir, (const char *path, mode_t mode), AT_FDCWD, "mkdir", CHANGES | GROWS, MADE, path, mode)
ON_PATH(mkdirat, (int folder, const char *path, mode_t mode), folder, "mkdir", CHANGES | GROWS, MADE, folder, path, mode)
ON_PATH(stat, (const char *path, struct stat *status), AT_FDCWD, "stat", READS, , path, status)
ON_PATH(stat64, (const char *path, struct stat64 *status), AT_FDCWD, "stat", READS, , path, status)
ON_PATH(lstat, (const char *path, struct stat *status), AT_FDCWD, "stat", READS, , path, status)
ON_PATH(lstat64, (const char *path, struct stat64 *status), AT_FDCWD, "stat", READS, , path, status)
ON_PATH(fstatat, (int folder, const char *path, struct stat *status, int flags), folder, "stat", READS, , folder, path, status, flags)
ON_PATH(fstatat64, (int folder, const char *path, struct stat64 *status, int flags), folder, "stat", READS, , folder, path, status, flags)
ON_PATH(statx, (int folder, const char *path, int flags, unsigned mask, struct statx *status), folder, "stat", READS, , folder, path, flags, mask, status)
ON_PATH(access, (const char *path, int mode), AT_FDCWD, "access", READS, , path, mode)
ON_PATH(utimensat, (int folder, const char *path, const struct timespec times[2], int flags), folder, "utime", CHANGES, , folder, path, times, flags)

#define ON_TWO(name, parameters, from_folder, to_folder, what, kind, ...) int name parameters { \
    char full[PATH_MAX], other[PATH_MAX]; \
    int from_watched = watched(from_folder, from, full), to_watched = watched(to_folder, to, other); \
    if (!from_watched && !to_watched) return NEXT(name)(__VA_ARGS__); \
    if (fails(what, to_watched ? other : full, kind)) return -1; \
    int result = RECORDED(NEXT(name)(__VA_ARGS__)); \
    DONE(if (!result) record(*what, -1, full, other, 0, "", 0)); \
    return result; }
#define TWO_AT (int from_folder, const char *from, int to_folder, const char *to)
#define TWO_AT_WITH_FLAGS(type) (int from_folder, const char *from, int to_folder, const char *to, type flags)
ON_TWO(rename, (const char *from, const char *to), AT_FDCWD, AT_FDCWD, "rename", CHANGES | GROWS, from, to)
ON_TWO(renameat, TWO_AT, from_folder, to_folder, "rename", CHANGES | GROWS, from_folder, from, to_folder, to)
ON_TWO(renameat2, TWO_AT_WITH_FLAGS(unsigned), from_folder, to_folder, "rename", CHANGES | GROWS, from_folder, from, to_folder, to, flags)
ON_TWO(link, (const char *from, const char *to), AT_FDCWD, AT_FDCWD, "link", CHANGES | GROWS, from, to)
ON_TWO(linkat, TWO_AT_WITH_FLAGS(int), from_folder, to_folder, "link", CHANGES | GROWS, from_folder, from, to_folder, to, flags)
