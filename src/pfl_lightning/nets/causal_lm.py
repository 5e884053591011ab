"""Causal language models of transformers, with adapters of peft."""

import inspect
import json
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from pfl_lightning.internals.of_torch import has_hooks, is_wrapped
from pfl_lightning.nets.base import Net
from pfl_lightning.nets.chunked_logits import ChunkedLogits
from pfl_lightning.nets.int8 import hold_in_int8
from pfl_lightning.nets.modes import kept_modes

DType = Literal["float32", "bfloat16"]
Attention = Literal["sdpa", "eager"]
Bits = Literal["int8", "8bit", "4bit"]

LORA = {"r": 8, "alpha": 16}
"""Adapters of a net without the setting ``lora``."""
SHORT = {
    "alpha": "lora_alpha",
    "targets": "target_modules",
    "dropout": "lora_dropout",
    "rslora": "use_rslora",
    "dora": "use_dora",
}
"""Names of ``lora`` for those of ``peft.LoraConfig``."""


CONFIGURATIONS = ("config.json", "tokenizer_config.json")
"""Files of a folder that may name a class in code beside them."""


class CausalLM(Net):
    """A causal language model of transformers, from a local folder or the hub's cache, with low-rank adapters of peft.

    The features are the model's layers with their adapters, and give hidden states ``[n, T, d]``. The classifier is the
    model's output layer. All but the adapters is frozen, and so exists once for all clients; copies of the net share
    it. Attribute ``adapted`` is the same model as a ``peft.PeftModel``.

    Inputs are token numbers ``[n, T]``, or a dict of ``input_ids`` with ``position_ids`` or ``attention_mask``, each
    ``[n, T]``; for two texts in a sample, as the task `Preference` has them, ``[n, 2, T]``. Texts that are padded on
    the right, with targets that are ignored there, need no mask: no token sees later ones. Several texts in one row are
    kept apart by ``position_ids`` that begin again at 0. A mask is for padding on the left.

    Args:
        input_shape: ``(T,)``, the largest number of tokens of a text; ``(2, T)`` for two texts in a sample.
        num_classes: number of tokens of the task, at most the model's own vocabulary. Models often have some rows more
            than their tokenizer has tokens; those get no logits.
        model: folder of a saved model, or the name of one in the hub's cache; nothing is downloaded.
        lora: settings of the adapters: ``r``, ``alpha``, ``targets``, ``dropout``, ``rslora``, ``dora``, and all others
            of ``peft.LoraConfig`` by their names there, such as ``modules_to_save: [lm_head]``; what is left out has
            peft's defaults, such as ``alpha: 8``. None has no adapters, and trains the whole model.
        dtype: type of the model's weights. Adapters and logits are float32 in either case.
        attention: implementation of the attention; ``eager`` is slower, and takes a mask under vmap.
        gradient_checkpointing: whether layers are computed again in the backward pass, for less memory. Engine
            ``vectorised`` doesn't allow it.
        quantize: ``int8`` holds the layers' weights in a byte each, on any device; ``8bit`` and ``4bit`` are those of
            bitsandbytes, on a GPU.
        chunk_tokens: positions whose logits exist at once in training, such as 1024, for less memory with large
            vocabularies; None computes the logits of a whole batch. The loss is the same. Engine ``vectorised`` doesn't
            allow it.

    Raises:
        MisconfigurationException: if there is no such model, it doesn't fit the data, a setting is none of its
            choices, or a package is missing.
    """

    adapted: Any

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        model: str,
        lora: dict[str, Any] | None = LORA,
        dtype: DType = "float32",
        attention: Attention = "sdpa",
        gradient_checkpointing: bool = False,
        quantize: Bits | None = None,
        chunk_tokens: int | None = None,
    ) -> None:
        check_choices(dtype=(dtype, DType), attention=(attention, Attention), quantize=(quantize, Bits))
        if quantize is not None and lora is None:
            raise MisconfigurationException(
                f"model.net.quantize={quantize} freezes all weights, and model.net.lora=null has no adapters to train; "
                "give lora, such as {r: 8}."
            )
        if chunk_tokens is not None and (type(chunk_tokens) is not int or chunk_tokens < 1):
            raise MisconfigurationException(
                f"model.net.chunk_tokens={chunk_tokens!r} must be a number of positions, at least 1, such as 1024, or "
                "null for all of a batch."
            )
        loaded = load(model, dtype, attention, quantize)
        check_sizes(loaded.config, model, input_shape, num_classes)
        if gradient_checkpointing:
            # the older way of torch would need inputs with gradients, and token numbers have none
            loaded.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        adapted = None
        if lora is not None:
            adapted = adapt(loaded.requires_grad_(False), lora)
        else:
            loaded.requires_grad_(True)
        super().__init__(
            Body(loaded.base_model, attention == "eager"),
            Logits(loaded.get_output_embeddings(), num_classes, chunk_tokens),
        )
        # past nn.Module: as a submodule it would give each entry of the `state_dict` a second name
        vars(self)["adapted"] = adapted
        self.settings = {"lora": lora, "dtype": dtype, "quantize": quantize}
        self.base = frozenset(name for name, parameter in self.named_parameters() if not parameter.requires_grad)
        check_head(self, loaded, model)

    def extra_repr(self) -> str:
        """Return the settings that layers don't show, by which a resumed run finds changes."""
        return ", ".join(f"{name}={value}" for name, value in self.settings.items())

    def __deepcopy__(self, memo: dict[int, Any]) -> "CausalLM":
        """Return a copy with adapters of its own and the same frozen weights."""
        # by name too: a method may freeze adapters, such as those of a copy that it writes itself
        kept = {name: p for name, p in self.named_parameters() if name in self.base and not p.requires_grad}
        memo.update({id(parameter): parameter for parameter in kept.values()})
        copy = type(self).__new__(type(self))
        memo[id(self)] = copy
        vars(copy).update(deepcopy(vars(self), memo))
        return copy


class Body(nn.Module):
    """The layers of a language model.

    Args:
        layers: the model of transformers without its output layer.
        adds: whether its attention takes masks as numbers to add, and not as truth values.
    """

    def __init__(self, layers: Any, adds: bool = False) -> None:
        super().__init__()
        self.layers = layers
        self.adds = adds
        config = layers.config
        windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
        self.window: int | None = min(filter(None, windows), default=None)
        """Tokens that a layer's attention looks back at most."""
        self.memory: Memory | None = None
        """Keys and values of earlier passes, inside `remembering`."""

    def forward(self, x: Tensor | dict[str, Tensor]) -> Tensor:
        """Return hidden states ``[n, T, d]``, or ``[n, texts, T, d]`` of several texts in a sample.

        Args:
            x: token numbers ``[n, T]`` or ``[n, texts, T]``, or a dict of inputs.
        """
        inputs = {"input_ids": x} if isinstance(x, Tensor) else x
        if (ids := inputs["input_ids"]).dim() > 2:
            # no text sees another, so that each is a row for the layers
            rows = {name: given.flatten(0, -2) for name, given in inputs.items()}
            states: Tensor = self(rows)
            return states.view(*ids.shape, states.shape[-1])
        if inputs["input_ids"].is_floating_point():
            raise MisconfigurationException("net CausalLM takes token numbers, int64, and not quantities.")
        if self.training and torch.is_grad_enabled() and self.computes_again:
            check_own_weights(self)
        if self.memory is not None:
            return self.memory.states(self.layers, inputs["input_ids"])
        positions = inputs.get("position_ids")
        # a mask for all layers leaves no layer a shorter window
        whole = self.window is None or inputs["input_ids"].shape[-1] <= self.window
        if positions is not None and "attention_mask" not in inputs and whole:
            inputs = {**inputs, "attention_mask": self.mask(positions)}
        hidden: Tensor = self.layers(**inputs, use_cache=False).last_hidden_state
        return hidden

    @property
    def computes_again(self) -> bool:
        """Whether layers are computed again in the backward pass."""
        return any(getattr(layer, "gradient_checkpointing", False) is True for layer in self.layers.modules())

    def mask(self, positions: Tensor) -> Tensor:
        """Return the mask ``[n, 1, T, T]`` by which tokens see earlier ones of their own text.

        transformers finds packed texts by a condition on positions, which engine ``vectorised`` can't have.

        Args:
            positions: ``[n, T]``, which begin again at 0 with each text.
        """
        text = (positions == 0).cumsum(-1)
        seen = (text[..., None] == text[..., None, :]).tril()[..., None, :, :]
        if not self.adds:
            return seen
        dtype = self.layers.dtype
        return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


class Memory:
    """Keys and values of texts that several passes of a module go on with, and the inputs of the next pass.

    A pass of a module may call the layers several times, as methods that mix models do; each call of a pass has keys
    and values of its own, found by its number in the pass.
    """

    def __init__(self) -> None:
        self.passes = 0
        """Passes so far."""
        self._caches: dict[tuple[int, int], Any] = {}
        self._calls: Counter[int] = Counter()
        self._mask = self._positions = torch.zeros(0, 0, dtype=torch.int64)
        self._bodies: list[Body] = []

    def inputs(self, texts: Sequence[list[int]], device: torch.device) -> Tensor:
        """Return the token numbers of the next pass ``[n, new]``: whole texts at first, then the last token of each.

        Args:
            texts: the texts so far, the same ones in each pass, which went on by a token.
            device: device of the result.
        """
        self._calls.clear()
        self.passes += 1
        if self.passes > 1:
            # the rest is remembered
            last = [[text[-1]] for text in texts]
            self._mask = torch.cat([self._mask, torch.ones_like(self._mask[:, :1])], 1)
            self._positions = self._positions[:, -1:] + 1
            return torch.tensor(last, device=device)
        width = max(map(len, texts))
        # on the left, so that the last tokens stand below each other
        gaps = torch.tensor([width - len(text) for text in texts], device=device)[:, None]
        places = torch.arange(width, device=device)
        self._mask = (places >= gaps).long()
        # as without padding: the first token of each text is at 0
        self._positions = (places - gaps).clamp(min=0)
        return torch.tensor([[0] * (width - len(text)) + text for text in texts], device=device)

    def states(self, layers: Any, tokens: Tensor) -> Tensor:
        """Return the hidden states of new tokens ``[n, new, d]``, and remember their keys and values.

        Args:
            layers: the model of transformers without its output layer.
            tokens: token numbers ``[n, new]``.
        """
        # copies of a net, such as a method's second model, have layers of their own
        key = (id(layers), self._calls[id(layers)])
        self._calls[id(layers)] += 1
        if key not in self._caches:
            self._caches[key] = package("transformers").DynamicCache(config=layers.config)
        # newer versions of transformers have another name for it
        name = "cache" if "cache" in inspect.signature(layers.forward).parameters else "past_key_values"
        given = {"attention_mask": self._mask, "position_ids": self._positions, name: self._caches[key]}
        hidden: Tensor = layers(input_ids=tokens, **given, use_cache=True).last_hidden_state
        return hidden

    def attach(self, bodies: Sequence[Body]) -> None:
        """Let layers remember."""
        self._bodies = list(bodies)
        for body in bodies:
            body.memory = self

    @contextmanager
    def put_aside(self) -> Iterator[None]:
        """Let layers compute whole texts, inside this context."""
        for body in self._bodies:
            body.memory = None
        try:
            yield
        finally:
            for body in self._bodies:
                body.memory = self


@contextmanager
def remembering(module: nn.Module) -> Iterator[Memory]:
    """Let the layers of language models in a module remember keys and values, inside this context.

    Args:
        module: the module.
    """
    memory = Memory()
    bodies = [layer for layer in module.modules() if isinstance(layer, Body)]
    memory.attach(bodies)
    try:
        yield memory
    finally:
        for body in bodies:
            body.memory = None


def check_own_weights(body: nn.Module) -> None:
    """Refuse methods with other weights in layers computed again in the backward pass.

    Args:
        body: the layers.

    Raises:
        MisconfigurationException: if one has: they would be gone by then, and gradients wrong.
    """
    if not all(isinstance(parameter, nn.Parameter) for parameter in body.parameters()):
        raise MisconfigurationException(
            "model.net.gradient_checkpointing=true computes layers again in the backward pass, and the method has "
            "weights beside the net's own, as FedDPA, FedALT and FedExLoRA have; set false, or take another method, "
            "such as FedIT or FedSALoRA."
        )


class Logits(nn.Module):
    """A language model's output layer, for the tokens of the task.

    Args:
        output: the layer, which may have adapters.
        tokens: number of tokens of the task.
        chunk_tokens: positions of a chunk in training; None has no chunks.
    """

    def __init__(self, output: nn.Module, tokens: int, chunk_tokens: int | None = None) -> None:
        super().__init__()
        self.output = output
        self.tokens = tokens
        self.chunk_tokens = chunk_tokens

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits ``[n, T, tokens]``, in single precision at least; in training by chunks if there are some.

        Args:
            hidden: hidden states ``[n, T, d]``.
        """
        # chunks are of three dimensions less one, so that they come back here for their own logits
        if self.chunk_tokens and hidden.dim() > 2 and self.training and torch.is_grad_enabled():
            # what is computed again in the backward pass has neither hooks of a method nor transforms of torch
            if not is_wrapped(hidden) and not any(map(has_hooks, self.modules())):
                return ChunkedLogits(self, hidden, self.chunk_tokens)  # type: ignore[return-value]
        logits: Tensor = self.output(hidden)[..., : self.tokens]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


def check_choices(**settings: tuple[Any, Any]) -> None:
    """Check settings with few values.

    Args:
        **settings: each setting's value, and the type with its choices; None is always allowed.

    Raises:
        MisconfigurationException: if a value is none of them.
    """
    for name, (value, choices) in settings.items():
        if value is not None and value not in get_args(choices):
            raise MisconfigurationException(
                f"model.net.{name}={value!r} must be one of {', '.join(get_args(choices))}."
            )


def package(name: str) -> Any:
    """Return an imported package of the extra ``lm``.

    Raises:
        MisconfigurationException: if it isn't installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise MisconfigurationException(
            f"model.net=CausalLM needs the package {name}; pip install 'pfl-lightning[lm]'."
        ) from error


def load(model: str, dtype: DType, attention: Attention, quantize: Bits | None) -> Any:
    """Return a pretrained model of transformers, in training mode; the arguments are those of `CausalLM`.

    Raises:
        MisconfigurationException: if there is no such model, or it can't be loaded in this way.
    """
    transformers = package("transformers")
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "attn_implementation": attention}
    by_bitsandbytes = quantize in ("8bit", "4bit")
    if by_bitsandbytes:
        if not torch.cuda.is_available():
            raise MisconfigurationException(
                f"model.net.quantize={quantize} computes on a GPU, and this machine has none that torch can use; take "
                "int8, which runs on any device, or null."
            )
        package("bitsandbytes")
        options["quantization_config"] = transformers.BitsAndBytesConfig(**{f"load_in_{quantize}": True})
    folder = local_folder(model, "model.net.model")
    try:
        if is_weightless() and not by_bitsandbytes:
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            loaded = transformers.AutoModelForCausalLM.from_config(config, **options)
        else:
            loaded = transformers.AutoModelForCausalLM.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, **options
            )
    # transformers raises many types, its own ones and those of the packages below
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise MisconfigurationException(
            f"model.net.model={model!r} can't be loaded as a causal language model ({type(error).__name__}: {reason}); "
            "give a folder with config.json and weights, as by save_pretrained, or other settings of model.net."
        ) from error
    # the output layer stays as it is: its weights are often those of the embedding
    if quantize == "int8" and not hold_in_int8(loaded.base_model):
        raise MisconfigurationException(
            f"model.net.quantize=int8 holds linear layers in 8 bits, and model.net.model={model!r} has layers of "
            "another class, as GPT-2 has; take null, or another model, such as one of the Llama or Qwen families."
        )
    # the name under which saved adapters remember their base
    loaded.name_or_path = model
    # a layer that is given in evaluation mode stays there, and has no dropout
    return loaded.train()


def is_weightless() -> bool:
    """Return whether nets are built on the device ``meta``, for their shapes alone."""
    return torch.get_default_device().type == "meta"


def local_folder(name: str, setting: str) -> str:
    """Return the folder of a model or tokenizer of transformers, from the hub's local cache if given by a name.

    Args:
        name: the folder, or a name on the hub.
        setting: the setting with the name, for messages.

    Raises:
        MisconfigurationException: if there is no such folder, or it asks for code of its own, which isn't run.
    """
    folder = name
    if not Path(name).is_dir():
        try:
            # looked up first: in places transformers asks the network for names, whatever `local_files_only` says
            folder = package("huggingface_hub").snapshot_download(name, local_files_only=True)
        # of a name that can't be one, or of a model that isn't there
        except (OSError, ValueError) as error:
            raise MisconfigurationException(
                f"{setting}={name!r} is no folder, and the hub's local cache has no such model; give the folder of a "
                f"saved one, or download it first by: hf download {name}"
            ) from error
    for file in CONFIGURATIONS:
        # a file that can't be read is refused by transformers
        with suppress(OSError, ValueError):
            content = json.loads(Path(folder, file).read_text(encoding="utf-8"))
            if isinstance(content, dict) and content.get("auto_map"):
                raise MisconfigurationException(
                    f"{setting}={name!r} asks by auto_map in {file} to run code of its own, which isn't done; give a "
                    "model of a class that transformers has."
                )
    return folder


def check_sizes(config: Any, model: str, input_shape: tuple[int, ...], num_classes: int) -> None:
    """Check that a model knows all tokens and positions of the data.

    Args:
        config: the model's configuration.
        model: its name.
        input_shape: shape of one sample.
        num_classes: number of tokens of the task.

    Raises:
        MisconfigurationException: if the model has fewer.
    """
    if num_classes > config.vocab_size:
        raise MisconfigurationException(
            f"model.net.model={model!r} has a vocabulary of {config.vocab_size} tokens, and the task has "
            f"{num_classes}; take the tokenizer that belongs to the model."
        )
    longest = getattr(config, "max_position_embeddings", None)
    if 1 <= len(input_shape) <= 2 and longest and input_shape[-1] > longest:
        raise MisconfigurationException(
            f"model.net.model={model!r} takes texts of up to {longest} tokens, and data have {input_shape[-1]}; cut "
            "them to this length."
        )


def adapt(model: Any, lora: dict[str, Any]) -> Any:
    """Return a model as a ``PeftModel`` with fresh adapters.

    Args:
        model: the model, frozen.
        lora: settings, as for `CausalLM`.

    Raises:
        MisconfigurationException: if peft refuses the settings.
    """
    peft = package("peft")
    settings = {SHORT.get(name, name): value for name, value in lora.items()}
    # the layers of GPT-2 have transposed weights
    settings.setdefault("fan_in_fan_out", any(type(layer).__name__ == "Conv1D" for layer in model.modules()))
    try:
        with warnings.catch_warnings():
            # peft asks by a name that transformers has renamed
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*")
            return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    # peft checks settings by exceptions of several types
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise MisconfigurationException(
            f"model.net.lora={lora}: peft can't make such adapters ({reason}); give r, alpha, targets, dropout, "
            "rslora, dora, or settings of peft.LoraConfig."
        ) from error


def check_head(net: CausalLM, whole: nn.Module, model: str) -> None:
    """Check that nothing comes after a model's output layer, such as a bound on logits.

    Args:
        net: the net.
        whole: the model.
        model: its name.

    Raises:
        MisconfigurationException: if the net's logits aren't those of the model.
    """
    if is_weightless():
        return
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=next(net.parameters()).device)
    with kept_modes(whole), torch.no_grad():
        whole.eval()
        expected, logits = whole(input_ids=tokens).logits[..., : net.classifier.tokens], net(tokens)
    if not torch.allclose(logits, expected.to(logits.dtype), atol=1e-4, rtol=1e-2):
        raise MisconfigurationException(
            f"model.net.model={model!r} computes its logits after the output layer, which CausalLM can't cut; take "
            "another model, such as one of the Llama, Qwen or GPT-2 families."
        )
