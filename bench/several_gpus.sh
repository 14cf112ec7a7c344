#!/bin/sh
# What several GPUs of one host are worth, beside one. Of each command FOLDER gets NAME.out, NAME.err and NAME.json (its
# last line).
#
#     bench/several_gpus.sh 2 FOLDER          two GPUs; 4 and 8 alike
#
# Experts of a Qwen3-30B-A3B split over all of them, and over two; rows of a Qwen3-8B dealt out; a head trained on
# Qwen3-8B with the same rows a device; tokens beside one device's, in float32 those of tiny-moe. Random weights. NVLink
# multicast stays off: on a shared host a program that uses it can put the GPUs out of service. MOE, DENSE, SMALL, DTYPE,
# TRAIN and PYTHON replace shapes, dtype, words of train_step and the interpreter.
set -u
gpus=${1:?how many GPUs} folder=${2:?where results go}
mkdir -p "$folder" && folder=$(cd "$folder" && pwd) && cd "$(dirname "$0")/.." || exit 1
export NCCL_NVLS_ENABLE=0 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python3} dtype=${DTYPE:-bfloat16} failed=0

run() { # name, seconds, command
    name=$1 seconds=$2
    shift 2
    timeout "$seconds" "$python" "$@" >"$folder/$name.out" 2>"$folder/$name.err" || { failed=1; echo "$name: failed"; }
    grep -v '^{' "$folder/$name.out"
    tail -n 1 "$folder/$name.out" | grep '^{' >"$folder/$name.json"
}

two=$([ "$gpus" -gt 2 ] && echo model=2)
moe=${MOE:-qwen3-30b-a3b} dense=${DENSE:-qwen3-8b} small=${SMALL:-qwen3-30b-a3b-6}
run equal 90 bench/devices.py --shape tiny-moe --dtype float32 --meshes one model=2 "expert=$gpus" "data=$gpus" \
    --tokens 64 --budgets 1 16 --steps 4 --repeats 1 --length 40 --slots 256
run parted 90 bench/devices.py --shape "$small" --dtype "$dtype" --meshes one "expert=$gpus" --tokens 32 --budgets 64 \
    --steps 4 --repeats 1
run experts 280 bench/devices.py --shape "$moe" --dtype "$dtype" --meshes one $two "model=$gpus" --budgets 1 16 64 128
run experts_batch 200 bench/devices.py --shape "$moe" --dtype "$dtype" --meshes one $two "model=$gpus" --budgets 1 16 \
    --batch 8 32
run rows 120 bench/devices.py --shape "$dense" --dtype "$dtype" --batch 32 --meshes one "data=$gpus" --budgets 1 16
train="bench/train_step.py --shape $dense --dtype $dtype ${TRAIN:-}"
run train_one 90 $train --micro_batch 2
run train_all 90 $train --micro_batch $((2 * gpus)) --mesh "data=$gpus"
exit $failed
