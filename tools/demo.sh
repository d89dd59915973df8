#!/bin/sh
# The whole way on real photographs with a tiny random model: build, verify, inspect, train, predict. See `make demo`.
set -eu
cd "$(dirname "$0")/.."
folder=demo

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
run() { printf '\n\033[1m$ %s\033[0m\n' "$1"; eval "$1"; }

say "A tiny random model with the real classes, and 13 edits of real photographs, into $folder/"
rm -rf "$folder/out" "$folder/data" "$folder/shards" "$folder"/prediction*.png "$folder"/shards.html
mkdir -p "$folder"
python tools/make_tiny_model.py "$folder/tiny" --variant edit-plus
python tools/make_demo_data.py "$folder/data"
cp tools/demo.yaml "$folder/qwen.yaml"
cd "$folder"

run "qwen-cache build data/ --out shards --model tiny/ --vae-device cpu --text-device cpu"
run "qwen-cache verify shards"
run "qwen-cache inspect shards --scan --html shards.html"
run "qwen-train run shards/ --config qwen.yaml"
control=data/control_images/china_black_and_white.jpg
run "qwen-train predict --image $control --prompt 'make it black and white' --lora out --out prediction.png --compare"

say "What was made, in $PWD:"
cat <<END
  data/            the photographs: control_images, target_images with their prompts
  shards/          the cache: cache.json, index.parquet, one .tar
  shards.html      a page about it, with all samples and their images
  out/             the LoRA (pytorch_lora_weights.safetensors), a checkpoint, metrics.jsonl, logs for TensorBoard,
                   report.html: curves and settings of the run
  prediction.png   what the tiny model draws with it: the photograph, coarsely (its weights are random; it does not
                   follow the prompt); prediction-compare.png shows it beside the photograph and without the LoRA
END
