#!/bin/sh
# From prompts to heads to a measured gain, in about two minutes: sh examples/quick_training.sh [MODEL]
#
# So short a run shows the way; heads worth having take hundreds of prompts and an hour or two.
set -e
MODEL=${1:-smollm2-135m-instruct}
OUT=${OUT:-examples-out}
mkdir -p "$OUT"
for topic in rivers bread stars bees chess glass rain maps salt tides bells moss; do
    echo "{\"prompt\": \"Tell me about $topic.\"}"
    echo "{\"prompt\": \"Write a short poem about $topic.\"}"
done > "$OUT/prompts.jsonl"

medusa-kit data inspect "$OUT/prompts.jsonl" --model "$MODEL"
medusa-kit train --quick -m "$MODEL" --prompts "$OUT/prompts.jsonl" --output "$OUT/heads" --hours "${HOURS:-0.02}"
medusa-kit generate "Tell me about bridges." -m "$MODEL" --heads "$OUT/heads/run/heads" -n 48
