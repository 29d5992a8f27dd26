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

_CONTEXT = (
    "the context is the model's own, and the KV cache grows with the requests; --max-new-tokens "
    "bounds an answer, serve --max-rows the requests, serve --default-max-tokens their answers"
)
_DEVICES = (
    "a model runs on one device, --device cuda:N; serve --replicas N runs copies of it (extra ray)"
)
_MEMORY = (
    "memory is taken as requests need it; serve --max-rows bounds how many are decoded together, "
    "and --cache float16 halves the KV cache on a CPU (lossy)"
)
_CACHE = "--cache float16 halves the KV cache on a CPU (lossy); there is no 8-bit or 4-bit KV cache"
_TREE = (
    "how many tokens are drafted follows from the tree (--tree FILE) or the drafter "
    "(--drafter-option num_nodes=12)"
)
_SPECULATION = "--drafter names who drafts, --heads the Medusa heads, --draft-model a smaller model"
_TEMPLATE = (
    "the chat template is the tokenizer's own; change chat_template in the model's "
    "tokenizer_config.json"
)
_RECIPE = "a recipe holds it; change it behind the recipe: medusa-kit train RECIPE "
_KEY = "arguments show in `ps`: "
_PREFILL = (
    "prefill is done in pieces by itself; serve --max-pause bounds how long it holds up answers"
)
_HUB = "files of the Hub lie in its cache: set HF_HOME in the environment"
_TOKEN = "arguments show in `ps`: set HF_TOKEN in the environment, or run `hf auth login`"
_REASONING = "tool calls and reasoning are recognised by the chat template; leave it out"
_WORKS_ALONE = "there is nothing to set; leave it out"
_DEFAULT = "that is so without it; leave it out"
_BY_REQUEST = "requests to a server bring their own; chat and generate have options for sampling"
_ONE_MACHINE = "a server runs on one machine; serve --ray-address has replicas on a cluster"
_OWN_CONFIG = "it is the model's own; change config.json in the model's folder"
_TEXT_ONLY = "models here read and write text"
_FOR_TRAINING = "recipes hold what training takes; see recipes/ and medusa-kit train -h"

# What has another meaning here, other values, or no option at all: what to do instead.
HINTS: Mapping[str, str] = {
    **_each("--api-key --api-keys",
            _KEY + "serve --api-key-file FILE (or MEDUSA_KIT_API_KEYS) has the keys; bench and "
            "data generate send that in the environment variable that --api-key-env names"),
    **_each("--hf-token --token --use-auth-token", _TOKEN),
    **_each("--max-model-len --ctx-size -c --context-length --max-total-tokens --max-input-length "
            "--max-input-tokens --max-seq-len --max-seq-length --model-max-length --n-ctx",
            _CONTEXT),
    **_each("--max-length", "--max-new-tokens bounds the answer alone"),
    **_each("--threads -t --threads-batch -tb --num-threads --cpu-threads --n-threads",
            "set OMP_NUM_THREADS=N in the environment (serve --replica-threads N for replicas)"),
    **_each("--tensor-parallel-size --tp-size --tp -tp --num-shard --sharded "
            "--pipeline-parallel-size --pp-size -pp --tensor-split -ts --split-mode -sm "
            "--expert-parallel-size --enable-expert-parallel --ep-size", _DEVICES),
    **_each("--data-parallel-size --dp-size --dp -dp",
            "serve --replicas N runs N copies of the model (extra ray)"),
    **_each("--device-map --gpu-id --base-gpu-id --gpus --main-gpu -mg", _DEVICES),
    **_each("--n-gpu-layers --gpu-layers -ngl --num-gpu-layers",
            "--device cuda runs the whole model on the GPU, --device cpu none of it"),
    **_each("--kv-cache-dtype --cache-type-k --cache-type-v -ctk -ctv --kv-cache-quant", _CACHE),
    **_each("--gpu-memory-utilization --mem-fraction-static --cuda-memory-fraction --swap-space "
            "--cpu-offload-gb --block-size --page-size --num-gpu-blocks-override", _MEMORY),
    **_each("--quantization -q --quantize --quantization-config --load-in-8bit --load-in-4bit",
            "quantised checkpoints and GGUF files are recognised by themselves; --weights int8 "
            "rounds others on a CPU (lossy)"),
    **_each("--max-concurrent-requests",
            "serve decodes --max-rows at once, and --max-queue may wait"),
    **_each("--max-num-batched-tokens --enable-chunked-prefill --chunked-prefill-size "
            "--max-batch-prefill-tokens --max-prefill-tokens --batch-prefill -b -ub --ubatch-size",
            _PREFILL),
    **_each("--speculate --num-speculative-tokens --speculative-num-draft-tokens "
            "--speculative-num-steps --speculative-eagle-topk --draft --draft-max --draft-min "
            "--draft-n --medusa-num-heads --medusa-choices --num-assistant-tokens", _TREE),
    **_each("--speculative-config -sc --speculative-model --speculative-algorithm "
            "--speculative-draft-model-path --speculative-method --prompt-lookup-num-tokens",
            _SPECULATION),
    **_each("--chat-template --chat-template-file --jinja --chat-template-kwargs "
            "--tokenizer-config-path", _TEMPLATE),
    **_each("--trust-remote-code",
            "code that comes with a checkpoint is never run; models are those of transformers"),
    **_each("--tokenizer --tokenizer-path --tokenizer-mode --tokenizer-name --skip-tokenizer-init",
            "the tokenizer is the model's own, from its folder or GGUF file"),
    **_each("--tokenizer-revision --code-revision", "--revision is that of the whole model"),
    **_each("--hf-repo -hf --hf-file -hff", "--model takes a Hub id, ORG/NAME, or a GGUF file"),
    **_each("--download-dir --huggingface-hub-cache --cache-dir --weights-cache-override", _HUB),
    **_each("--load-format --no-mmap --mlock --numa --warmup --no-warmup", _WORKS_ALONE),
    **_each("--metrics --enable-metrics --slots --props --webui --no-webui --disable-log-stats "
            "--stream --no-stream --streaming --cont-batching -cb --continuous-batching "
            "--scheduling-policy --schedule-policy --num-scheduler-steps --ignore-eos "
            "--context-shift --no-context-shift --no-display-prompt --usage-stats "
            "--max-waiting-tokens --waiting-served-ratio --validation-workers "
            "--disable-custom-kernels --model-impl --env", _WORKS_ALONE),
    **_each("--no-enforce-eager --no-torch-compile --no-enable-torch-compile", _DEFAULT),
    **_each("--generation-config --override-generation-config --random-seed --max-logprobs",
            _BY_REQUEST),
    **_each("--hf-overrides --json-model-override-args --rope-scaling --rope-theta "
            "--rope-freq-base --rope-freq-scale --yarn-orig-ctx", _OWN_CONFIG),
    **_each("--limit-mm-per-prompt --mmproj --embedding --embeddings --reranking --rerank "
            "--is-embedding --task --runner", _TEXT_ONLY),
    **_each("--nnodes --node-rank --master-addr --dist-init-addr "
            "--distributed-executor-backend", _ONE_MACHINE),
    **_each("--root-path", "the paths are those of OpenAI's API, /v1/...; put a reverse proxy "
            "before the server for others"),
    **_each("--num-return-sequences --max-best-of", "a prompt is answered once; ask again with "
            "another --seed"),
    **_each("--lora-modules --enable-lora --lora --lora-paths --lora-adapters --max-loras "
            "--max-lora-rank",
            "merge the adapter into its base and name that as --model; serve --heads-dir has heads "
            "with adapters that medusa-kit trained"),
    **_each("--flash-attn -fa --attn-implementation --attention-backend --flash-attention",
            "--attention takes auto, sdpa, flash or triton"),
    **_each("--cuda-graphs --cuda-graph-max-bs --cuda-graph-bs --compilation-config -O",
            "--fixed-shapes takes auto, always or never (CUDA graphs); --compile compiles them"),
    **_each("--do-sample --num-beams --use-beam-search",
            "a --temperature above 0 samples; there is no beam search"),
    **_each("--grammar --grammar-file --guided-decoding-backend --grammar-backend "
            "--structured-outputs-config --constrained-json",
            "--json-schema FILE, --regex, --lark FILE or --choice constrain an answer; requests "
            "to a server bring their own"),
    **_each("--enable-auto-tool-choice --tool-call-parser --reasoning-parser --enable-reasoning "
            "--reasoning-format", _REASONING),
    **_each("--ssl-keyfile --ssl-certfile --ssl-key-file --ssl-cert-file",
            "the server speaks plain HTTP; put a reverse proxy with the certificate before it"),
    **_each("--log-level --uvicorn-log-level --log-verbosity --log-verbose -lv",
            "serve --log-format takes plain, json or none"),
    **_each("--request-rate", "bench --arrivals poisson --rate R"),
    **_each("--dataset-name", "--prompts takes a file or a data set's name"),
    **_each("--interactive -i -cnv --conversation", "medusa-kit chat is for conversations"),
    **_each("--num-train-epochs --epochs", _RECIPE + "train.epochs=2"),
    **_each("--per-device-train-batch-size --gradient-accumulation-steps --warmup-ratio "
            "--warmup-steps --weight-decay --lr-scheduler-type --bf16 --fp16 --deepspeed",
            _FOR_TRAINING),
    **_each("--learning-rate --lr", _RECIPE + "train.learning_rate=1e-3"),
    **_each("--medusa-num-layers", _RECIPE + "heads.num_blocks=1"),
}  # fmt: skip

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
