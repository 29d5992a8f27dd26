"""A reference for models whose float32 form is too large for the memory: transformers' own forward
with stock attention, whose weights are read layer by layer from the checkpoint.

A layer's weights are there, in float32, only while it runs; of linear layers and embeddings, which
are large, some rows are there at a time. None of the kit's other ways of computing a forward is
used, nor of reading blocks of a file.

Shapes: B texts, T tokens, N places in them, D hidden, V vocabulary, R rows of an embedding, O and I
outputs and inputs of a linear layer.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from threading import Semaphore, local
from typing import Any

import torch
from torch import Tensor, nn

from medusa_kit.base.distinct_prefixes import DistinctPrefixes
from medusa_kit.base.files import gguf_source, resolve, stored_generation_config
from medusa_kit.base.remembered_configs import own_config, read_config
from medusa_kit.base.stored_tensors import Piece, StoredTensors, skeleton_of, stored_tensors
from medusa_kit.errors import IncompatibleBaseError
from medusa_kit.locks import lock_of
from medusa_kit.no_gradients import no_gradients
from medusa_kit.one_thread import can_be_alone, one_thread

# Of one forward: more would save reading weights, but activations take memory as well.
MAX_TOKENS = 2048
MAX_LOGITS = 1 << 27  # 512 MB
FEW_TOKENS = 512  # torch's threads would spin longer than they save beside the products
PIECE = 1 << 20  # numbers of a weight that a thread reads at a time: they stay in the caches

# What becomes of a linear layer's weights before they are used.
Change = Callable[[nn.Linear, Tensor], Tensor]


class LayerwiseModel:
    """Plain logits of texts. `model`: transformers' model, most of whose parameters are empty
    between forwards.

    `change`: of a linear layer's weights, for a model that is not the checkpoint's own.
    """

    def __init__(self, config: Any, path: Path, change: Change | None = None) -> None:
        """`place`: as of `stored_tensors`. Raises CheckpointError, IncompatibleBaseError."""
        if getattr(config, "quantization_config", None) is not None:
            raise _cannot(config.model_type, "its checkpoint is quantised")
        config = copy.deepcopy(config)
        config.dtype = torch.float32
        self.model = skeleton_of(config)
        self._change = change
        self._stored: StoredTensors = stored_tensors(path, self.model)
        self._tied: dict[str, str] = getattr(self.model, "all_tied_weights_keys", None) or {}
        self._names = {module: name for name, module in self.model.named_modules()}
        self._empty: dict[nn.Module, list[tuple[nn.Module, str, Any]]] = {}
        decoder = self.model.get_decoder()
        decoder = getattr(decoder, "model", decoder)  # Llama 4's model names itself
        layers = getattr(decoder, "layers", None)
        if layers is None:
            raise _cannot(config.model_type, "its decoder has no `layers`")
        embedding, output = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        embedding.padding_idx = None  # it is of no use here, and few rows may be fewer than it
        # Rows are read for each call; Llama 4 looks at the device before.
        embedding.weight = nn.Parameter(embedding.weight.new_empty(0, device="cpu"), False)
        embedding.register_forward_pre_hook(self._read_used_rows)
        bias_V = None if output.bias is None else self._bias_of(output)
        self._output = _Output(output, self._product, bias_V)
        self.model.set_output_embeddings(self._output)
        # Each computes alone: to read a piece takes some ten operations of torch, after each of
        # which its own threads would wait for each other.
        self.num_threads = torch.get_num_threads() if can_be_alone() else 1
        self.turns = Semaphore(self.num_threads)  # whoever holds some leaves cores to others
        self._threads: Threads | None = None  # of the forward under way
        self._prefixes: DistinctPrefixes | None = None  # of the forward under way
        self._stopped = False
        inside = {module for layer in layers for module in layer.modules()}
        self._linears = {module for module in inside if type(module) is nn.Linear}
        for linear in self._linears:
            linear.forward = partial(self._linear, linear)  # type: ignore[method-assign]
        for module in self._names:
            if module not in inside and module not in (embedding, output):
                self._fill_own(module)
        for layer in layers:
            layer.register_forward_pre_hook(self._fill)
            layer.register_forward_hook(self._drop, always_call=True)

    @property
    def num_logits(self) -> int:
        return len(self._output.weight)

    @property
    def generation_config(self) -> Any:
        return self.model.generation_config

    @property
    def generation(self) -> Any:
        """What has transformers' functions of generation."""
        return self.model

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def stop(self) -> None:
        """Let the forward under way, and every later one, end with CancelledError at its next piece
        of a weight."""
        self._stopped = True

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """As they are stored, one at a time."""
        return ((name, self._stored.read(name)) for name in sorted(self._stored.names))

    def last_logits(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """logits_BV after the last token of each text. One with which another text begins is read
        within that: a causal model gives the same there."""
        longest = list[Sequence[int]]()
        read_in = dict[int, int]()  # a text -> the one of `longest` that it is read in
        for index in sorted(range(len(texts)), key=lambda i: -len(texts[i])):
            text = list(texts[index])
            whole = (i for i, other in enumerate(longest) if list(other[: len(text)]) == text)
            if (read_in_one := next(whole, None)) is None:
                read_in_one = len(longest)
                longest.append(text)
            read_in[index] = read_in_one
        ends = [(read_in[index], len(text) - 1) for index, text in enumerate(texts)]
        wanted = [sorted({end for own, end in ends if own == i}) for i in range(len(longest))]
        found = dict(self._logits_at(longest, wanted))
        return torch.stack([found[own][wanted[own].index(end)] for own, end in ends])

    def logits(
        self, texts: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> Iterator[tuple[int, Tensor]]:
        """(index of a text, logits_NV after each of its tokens from its start on), as they are
        computed: texts of similar length together, so that weights are read few times.

        They are padded on the right, which changes nothing before it.
        """
        ends = zip(starts, map(len, texts), strict=True)
        return self._logits_at(texts, [range(*places) for places in ends])

    def _logits_at(
        self, texts: Sequence[Sequence[int]], places_of: Sequence[Sequence[int]]
    ) -> Iterator[tuple[int, Tensor]]:
        """As `logits`, after the tokens at these places of each text."""
        for batch in self._batches(texts, [len(places) for places in places_of]):
            ids_BT = nn.utils.rnn.pad_sequence(
                [torch.tensor(list(texts[index])) for index in batch], batch_first=True
            )
            places = [places_of[index] for index in batch]
            with torch.inference_mode(), lock_of(self.model):
                self._output.places = [(row, place) for row, own in enumerate(places)
                                       for place in own]  # fmt: skip
                self._prefixes = DistinctPrefixes([texts[index] for index in batch])
                alone = one_thread() if ids_BT.numel() <= FEW_TOKENS else nullcontext()
                with Threads(self.num_threads, self.turns) as self._threads, alone:
                    logits_NV = self.model(ids_BT, use_cache=False).logits
            yield from zip(batch, logits_NV.split([len(own) for own in places]), strict=True)

    def _batches(
        self, texts: Sequence[Sequence[int]], nums_wanted: Sequence[int]
    ) -> Iterator[list[int]]:
        batch, num_wanted = list[int](), 0
        for index in sorted(range(len(texts)), key=lambda i: -len(texts[i])):
            own = nums_wanted[index]
            tokens = (len(batch) + 1) * len(texts[batch[0]] if batch else texts[index])
            if batch and (tokens > MAX_TOKENS or (num_wanted + own) * self.num_logits > MAX_LOGITS):
                yield batch
                batch, num_wanted = [], 0
            batch, num_wanted = [*batch, index], num_wanted + own
        if batch:
            yield batch

    def _fill(self, layer: nn.Module, _: Any) -> None:
        self._empty[layer] = [one for part in layer.modules() for one in self._fill_own(part)]

    def _drop(self, layer: nn.Module, *_: Any) -> None:
        for owner, name, empty in self._empty.pop(layer, ()):
            setattr(owner, name, empty)

    def _fill_own(self, module: nn.Module) -> list[tuple[nn.Module, str, Any]]:
        """Read the parameters that are the module's own; what was in their place."""
        before = list[tuple[nn.Module, str, Any]]()
        for name, empty in list(module.named_parameters(recurse=False)):
            if module in self._linears and name == "weight":
                continue
            weight = self._stored.read(self._stored_name(f"{self._names[module]}.{name}")).float()
            if name == "weight":
                weight = self._changed(module, weight)
            setattr(module, name, nn.Parameter(weight, requires_grad=False))
            before.append((module, name, empty))
        return before

    def _stored_name(self, name: str) -> str:
        return name if name in self._stored.names else self._tied.get(name, name)

    def _changed(self, module: nn.Module, weight: Tensor) -> Tensor:
        if self._change is None or not isinstance(module, nn.Linear):
            return weight
        return self._change(module, weight)

    def _read_used_rows(self, embedding: Any, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        """Let the embedding have the rows of these tokens alone, and number the tokens by them."""
        used_R, places_BT = args[0].unique(return_inverse=True)
        name = self._stored_name(f"{self._names[embedding]}.weight")
        rows_RD = self._stored.read_rows(name, used_R).float()
        embedding.weight = nn.Parameter(rows_RD, requires_grad=False)
        return (places_BT,)

    def _bias_of(self, linear: nn.Linear) -> Tensor:
        return self._stored.read(self._stored_name(f"{self._names[linear]}.bias")).float()

    def _linear(self, linear: nn.Linear, inputs: Tensor) -> Tensor:
        """What the layer computes."""
        inputs_ND, back_N = inputs.flatten(0, -2), None
        if self._prefixes is not None:
            inputs_ND, back_N = self._prefixes.chosen(inputs_ND)
        outputs_NO = self._product(linear, inputs_ND)
        if linear.bias is not None:
            outputs_NO += linear.bias
        outputs_NO = outputs_NO if back_N is None else outputs_NO[back_N]
        return outputs_NO.view(*inputs.shape[:-1], -1)

    def _product(self, linear: nn.Linear, inputs_NI: Tensor) -> Tensor:
        """inputs @ weight.T, piece by piece of the weight's rows."""
        outputs_NO = inputs_NI.new_empty(len(inputs_NI), linear.out_features)

        def fill(piece: Piece, buffer: Tensor) -> None:
            if self._stopped:
                raise CancelledError
            rows, weight_RI = piece(buffer)
            outputs_NO[:, rows] = inputs_NI @ self._changed(linear, weight_RI).T

        assert self._threads is not None, "within a forward"
        name = self._stored_name(f"{self._names[linear]}.weight")
        self._threads.each(fill, self._stored.pieces(name, PIECE))
        return outputs_NO


class Threads(ThreadPoolExecutor):
    """Each has a buffer for one piece after another, and waits for a turn for each."""

    def __init__(self, count: int, turns: Semaphore) -> None:
        super().__init__(count)
        self._turns, self._own = turns, local()

    def each(self, work: Callable[[Piece, Tensor], None], pieces: Sequence[Piece]) -> None:
        """Do the work with each piece and the buffer of the thread that does it."""

        @no_gradients
        def alone(piece: Piece) -> None:
            if not hasattr(self._own, "buffer"):
                self._own.buffer = torch.empty(PIECE, dtype=torch.float32)
            with self._turns, one_thread():
                work(piece, self._own.buffer)

        list(self.map(alone, pieces))


def layerwise_model(
    name: str, revision: str | None = None, change: Change | None = None
) -> LayerwiseModel:
    """The base model of this name, read layer by layer. Raises CheckpointError,
    IncompatibleBaseError."""
    from transformers.utils import cached_file

    source, location = resolve(name, weights=False)
    if source in ("debug", "adapter"):
        raise _cannot(name, "its weights are not all in one checkpoint")
    config = own_config(read_config(location, revision))
    folder = Path(location)
    if source == "hub":  # the snapshot that the config was read from
        folder = Path(cached_file(name, "config.json", revision=revision)).parent
    model = LayerwiseModel(config, gguf_source(name) or folder, change)
    if (settings := stored_generation_config(name, revision)) is not None:
        model.model.generation_config = settings
    return model


def _cannot(what: str, why: str) -> IncompatibleBaseError:
    return IncompatibleBaseError(
        f"{what!r} cannot be run layer by layer: {why}",
        hint="a machine with memory for the whole model in float32 is needed",
    )


class _Output(nn.Module):
    """In place of the output embedding: logits_NV at `places` (row, token).

    `weight` has the right number of rows, and none of the numbers.
    """

    weight: Tensor

    def __init__(
        self,
        output: nn.Linear,
        product: Callable[[nn.Linear, Tensor], Tensor],
        bias_V: Tensor | None,
    ) -> None:
        super().__init__()
        self.register_buffer(
            "weight", torch.empty(output.out_features, 0, dtype=torch.float32), persistent=False
        )
        self._replaced, self._product = [output], product  # in a list, so as to be no submodule
        self._bias_V = bias_V
        self.places: list[tuple[int, int]] = []

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        rows_N, tokens_N = torch.tensor(self.places).T
        logits_NV = self._product(self._replaced[0], hidden_BTD[rows_N, tokens_N])
        return logits_NV if self._bias_V is None else logits_NV + self._bias_V
