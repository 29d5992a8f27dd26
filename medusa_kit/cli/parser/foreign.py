"""What users of vLLM, SGLang, TGI, llama.cpp, transformers and Medusa's own code type, and what it
is called here.

Long names are without underscores: `--max_model_len` is read as `--max-model-len`.
"""

from collections.abc import Iterable, Mapping

PROMPT = "PROMPT"  # the argument


def _each(names: str, meaning: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), meaning)


# Same meaning, same values: read as ours. A second word is the value that ours then has.
SAME: Mapping[str, str] = {
    **_each("--model-path --model-id --model-name --model-name-or-path --pretrained "
            "--pretrained-model-name-or-path", "--model"),
    **_each("--torch-dtype", "--dtype"),
    **_each("--config-file", "--config"),
    **_each("--medusa-path --medusa-model --medusa-model-path --medusa-name-or-path", "--heads"),
    **_each("--model-draft --assistant-model --draft-model-path -md", "--draft-model"),
    **_each("--max-tokens --n-predict --predict --max-completion-tokens --max-gen-len "
            "--max-answer-tokens", "--max-new-tokens"),
    **_each("--temp", "--temperature"),
    **_each("--stop-strings --stop-sequences --reverse-prompt -r", "--stop"),
    **_each("--repeat-penalty", "--repetition-penalty"),
    **_each("--json-schema-file -jf", "--json-schema"),
    **_each("--system-prompt --system-message -sys", "--system"),
    **_each("--prompt -p", PROMPT),
    **_each("--file -f --input --input-file --prompt-file --prompts-file --dataset "
            "--dataset-path --prompt-set", "--prompts"),
    **_each("--num-prompts --num-samples --max-samples", "--limit"),
    **_each("--out --outfile --output-file --output-dir --output-path --out-dir --outdir "
            "--save-dir --result-dir", "--output"),
    **_each("--bs", "--batch-size"),
    **_each("--max-num-seqs --max-running-requests --max-batch-size --parallel -np", "--max-rows"),
    **_each("--alias -a", "--served-model-name"),
    **_each("--hostname", "--host"),
    **_each("--cors-allow-origin --allowed-origins", "--cors-origin"),
    **_each("--max-concurrency", "--concurrency"),
    **_each("--base-url --api-base", "--endpoint"),
    **_each("--num-processes --nproc-per-node", "--nproc"),
    **_each("--enforce-eager --disable-cuda-graph", "--fixed-shapes never"),
    **_each("--enable-prefix-caching", "--prefix-cache on"),
    **_each("--no-enable-prefix-caching --disable-radix-cache --no-cache-prompt",
            "--prefix-cache off"),
    **_each("--disable-log-requests --no-enable-log-requests", "--log-format none"),
    **_each("--enable-torch-compile --torch-compile", "--compile"),
    **_each("--payload-limit --max-request-body-size", "--max-body"),
}  # fmt: skip

# What has another meaning here, other values, or no option at all: what to do instead. The forty
# typed most; others are refused as any unknown option.
HINTS: Mapping[str, str] = {
    "--api-key": "arguments show in `ps`: serve --api-key-file FILE (or MEDUSA_KIT_API_KEYS) has "
    "the keys; bench and data generate send that in the environment variable that --api-key-env "
    "names",
    "--hf-token": "arguments show in `ps`: set HF_TOKEN in the environment, or run `hf auth login`",
    **_each("--max-model-len --ctx-size -c --context-length",
            "the context is the model's own, and the KV cache grows with the requests; "
            "--max-new-tokens bounds an answer, serve --max-rows the requests, serve "
            "--default-max-tokens their answers"),
    "--max-length": "--max-new-tokens bounds the answer alone",
    **_each("--threads -t",
            "set OMP_NUM_THREADS=N in the environment (serve --replica-threads N for replicas)"),
    **_each("--tensor-parallel-size --tp --device-map",
            "a model runs on one device, --device cuda:N; serve --replicas N runs copies of it "
            "(extra ray)"),
    **_each("--n-gpu-layers -ngl",
            "--device cuda runs the whole model on the GPU, --device cpu none of it"),
    **_each("--kv-cache-dtype -ctk", "--cache float16 halves the KV cache on a CPU (lossy); there "
            "is no 8-bit or 4-bit KV cache"),
    **_each("--gpu-memory-utilization --mem-fraction-static --swap-space",
            "memory is taken as requests need it; serve --max-rows bounds how many are decoded "
            "together, and --cache float16 halves the KV cache on a CPU (lossy)"),
    **_each("--quantization --load-in-4bit",
            "quantised checkpoints and GGUF files are recognised by themselves; --weights int8 "
            "rounds others on a CPU (lossy)"),
    **_each("--speculate --num-speculative-tokens --draft-max --medusa-choices",
            "how many tokens are drafted follows from the tree (--tree FILE) or the drafter "
            "(--drafter-option num_nodes=12)"),
    "--speculative-config": "--drafter names who drafts, --heads the Medusa heads, --draft-model a "
    "smaller model",
    **_each("--chat-template --jinja",
            "the chat template is the tokenizer's own; change chat_template in the model's "
            "tokenizer_config.json"),
    "--trust-remote-code": "code that comes with a checkpoint is never run; models are those of "
    "transformers",
    "--tokenizer": "the tokenizer is the model's own, from its folder or GGUF file",
    "-hf": "--model takes a Hub id, ORG/NAME, or a GGUF file",
    "--cache-dir": "files of the Hub lie in its cache: set HF_HOME in the environment",
    **_each("--do-sample --num-beams",
            "a --temperature above 0 samples; there is no beam search"),
    "--flash-attn": "--attention takes auto, sdpa, flash or triton",
    "--grammar": "--json-schema FILE, --regex, --lark FILE or --choice constrain an answer; "
    "requests to a server bring their own",
    **_each("--enable-auto-tool-choice --reasoning-parser",
            "tool calls and reasoning are recognised by the chat template; leave it out"),
    "--log-level": "serve --log-format takes plain, json or none",
    **_each("--learning-rate --lr", "a recipe holds it; change it behind the recipe: medusa-kit "
            "train RECIPE train.learning_rate=1e-3"),
    **_each("--epochs --num-epochs --num-train-epochs", "a recipe holds them; change them behind "
            "the recipe: medusa-kit train RECIPE train.epochs=3"),
}  # fmt: skip

# What does in one command what an option does in others.
INSTEAD: Mapping[tuple[str, str], str] = {
    (
        "doctor",
        "--prompts",
    ): "--data FILE takes what the heads were trained on: conversations, or answers of "
    "`medusa-kit data generate`",
    (
        "generate",
        "--limit",
    ): "for the first prompts of a file: head -n 4 FILE | medusa-kit generate --prompts -",
}

COMMANDS: Mapping[str, str] = {
    "run": "chat", "cli": "chat", "interactive": "chat", "server": "serve", "launch": "serve",
    "launch-server": "serve", "api": "serve", "complete": "generate", "completion": "generate",
    "benchmark": "bench", "eval": "verify", "test": "verify", "check": "doctor",
    "download": "pull", "upload": "push", "export": "convert", "finetune": "train",
    "collect-env": "doctor", "version": "--version",
}  # fmt: skip


def kit_options_in(sentences: Iterable[str]) -> list[str]:
    """The kit's options that sentences or targets name, each once."""
    words = (word.strip("`(),;:.") for sentence in sentences for word in sentence.split())
    return list(dict.fromkeys(word for word in words if word.startswith("--")))
