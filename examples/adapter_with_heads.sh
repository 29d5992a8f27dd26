#!/bin/sh
# Medusa-2: a LoRA adapter with its heads, trained and used: sh examples/adapter_with_heads.sh
#
# On a tiny random model, so that it takes seconds; recipes/smollm2_135m_stage2.yaml is a real one.
set -e
OUT=${OUT:-examples-out}
HERE=$(dirname "$0")
medusa-kit train "$HERE/../recipes/debug.yaml" stage=medusa2 base.model=debug-tiny \
    output_dir="$OUT/adapted" deepspeed.enabled=false
medusa-kit generate "Hello!" -m "$OUT/adapted/adapter" -n 16     # base, adapter and heads in one step
medusa-kit verify -m "$OUT/adapted/adapter" --limit 2
