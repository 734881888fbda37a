"""A GPU that every machine has, for tests; and the memory that an object holds.

Inside `pretended_gpu()`, `torch.device("cuda")` works on any machine. Tensors there say `cuda:0`, and the CPU computes
their values. An operation that mixes them with CPU tensors raises, as it does on a GPU. `FakeTensorMode` checks
devices too, but its tensors have no values, and `tolist` and `nonzero` need values.

`PretendedGPU.waits` counts what a CPU waits for. C++ below the dispatcher takes the tensors for those of the CPU, so
that an operator which waits inside of a kernel must be in `_WAITING` by name.
"""

import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, cast
from unittest import mock

import torch
import torch.fx.traceback
import trl.kernels.chunked_logprob
import trl.trainer.utils
from accelerate.state import AcceleratorState, PartialState
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

from trl_steady.core.types import Scorer
from trl_steady.functional import pooling

CUDA = torch.device("cuda", 0)
_CPU = torch.device("cpu")
_INDEXING = ("aten.index.Tensor", "aten.index_put.default", "aten.index_put_.default")
_MAKES_ANOTHER = (torch.nn.functional.one_hot, Tensor.new_tensor)  # inside, where no mode sees its device
HAS_INTERPRETER = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
_FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray)  # which copy numbers to a device; others fill it
_WAITING = (
    *("aten._local_scalar_dense", "aten.nonzero.", "aten.masked_select", "aten.bincount", "aten.equal."),
    *("aten.repeat_interleave", "aten._unique", "aten.unique"),
)
_PACKAGES = ("trl_steady", "trl", "transformers")


class Wait(NamedTuple):
    """An operation for which the CPU waits, because it needs a value, a size or an unpinned copy."""

    operation: str
    package: str
    """Whose code is the innermost, of `_PACKAGES`; "" for nobody's."""
    place: str
    """Module and function of this code. In backward, of the code whose gradient is computed."""


def _cause() -> tuple[str, str]:
    """Return the package and the place of a wait."""
    frame: Any = sys._getframe(2)
    node = torch._C._current_autograd_node()
    if node is None:
        return _innermost(frame)
    package, place = _innermost(frame, until="run_backward")
    if package:
        return package, place
    # no Python function computes this gradient
    package, place = node.metadata.get("traceback_", ("", ""))
    return package, f"backward of {place or node.name()}"


def _innermost(frame: Any, until: str = "") -> tuple[str, str]:
    """Return package and place of the innermost code that is of `_PACKAGES`, below a function called `until`."""
    while frame is not None and frame.f_code.co_name != until:
        name = frame.f_globals.get("__name__", "")
        package = name.split(".")[0]
        if package in _PACKAGES:
            function = frame.f_code.co_qualname.split(".<")[0]  # without comprehensions and functions in it
            return package, f"{name.split('.')[-1]}.{function}"
        frame = frame.f_back
    return "", ""


@contextmanager
def nodes_know_their_code() -> Iterator[None]:
    """Let autograd note for each node of a graph whose code made it.

    Its anomaly mode does so with the text of the whole stack, which takes half of the time.
    """

    def made_by() -> list[str]:
        return [*_innermost(sys._getframe(1))]

    with (
        mock.patch.object(torch.fx.traceback, "format_stack", made_by),
        torch.autograd.set_detect_anomaly(True, check_nan=False),
    ):
        yield


class PretendedGPU(TorchFunctionMode):
    """Carries out what Python asks of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[Wait] = []
        """Transfers so far for which the CPU has to wait."""
        self.kernel_arguments = 0
        """Arguments so far of kernels that Triton's interpreter ran."""

    def add_wait(self, operation: str) -> None:
        """Note a transfer."""
        self.waits.append(Wait(operation, *_cause()))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.tolist and isinstance(args[0], _OnGPU):
            self.add_wait("tolist")
            return args[0].on_host.tolist()
        if func in (Tensor.cpu, Tensor.cuda):
            return self._moved(args[0], _CPU if func is Tensor.cpu else CUDA)
        if func is Tensor.pin_memory:
            pinned = args[0].clone()
            pinned.is_pinned_here = True
            return pinned
        if func is Tensor.to:
            is_async = kwargs.pop("non_blocking", False) and hasattr(args[0], "is_pinned_here")
            return self._to(kwargs.pop("device", None), *args, is_async=is_async, **kwargs)
        if func in _MAKES_ANOTHER and isinstance(args[0], _OnGPU):
            if func is Tensor.new_tensor:
                self.add_wait("from CPU")
            return _OnGPU(func(args[0].on_host, *args[1:], **kwargs))
        if func in (torch.where, Tensor.where) and len({type(each) for each in args if isinstance(each, Tensor)}) > 1:
            self.add_wait("from CPU")
        if torch.device(kwargs.get("device") or "meta").type == "meta":
            return func(*args, **kwargs)
        device = torch.device(kwargs.pop("device"))
        is_async = func not in _FROM_DATA
        return tree_map_only(Tensor, lambda each: self._moved(each, device, is_async), func(*args, **kwargs))

    def _to(self, device: Any, own: Tensor, *others: Any, is_async: bool, **keywords: Any) -> Tensor:
        for each in others:  # a device, a dtype, a tensor that has both, or a flag
            if isinstance(each, Tensor):
                device, keywords["dtype"] = each.device, each.dtype
            elif isinstance(each, torch.dtype):
                keywords["dtype"] = each
            elif isinstance(each, str | torch.device):
                device = each
        own = own if device is None else self._moved(own, torch.device(device), is_async)
        return Tensor.to(own, **keywords) if keywords else own

    def _moved(self, tensor: Tensor, device: torch.device, is_async: bool = False) -> Tensor:
        if isinstance(tensor, _OnGPU) == (device.type == "cuda"):
            return tensor
        if isinstance(tensor, _OnGPU):
            self.add_wait("to CPU")
            return tensor.on_host.clone()
        if not is_async:
            self.add_wait("from CPU")
        return _OnGPU(tensor.detach().clone())


class _OnGPU(Tensor):
    """A tensor of the pretended device."""

    on_host: Tensor
    device = property(lambda self: CUDA)  # pyright: ignore[reportAssignmentType]
    is_cuda = property(lambda self: True)  # pyright: ignore[reportAssignmentType]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, on_host: Tensor) -> "_OnGPU":
        layout: Any = {"strides": on_host.stride(), "storage_offset": on_host.storage_offset(), "dtype": on_host.dtype}
        made = Tensor._make_wrapper_subclass(cls, on_host.shape, **layout)  # the device of C++ stays the CPU
        made.on_host = on_host
        return made

    def __repr__(self, **_: Any) -> str:
        return f"{self.on_host!r} on {CUDA}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _refuse_mixed(func, args, kwargs)
        if _current is not None and _waits(func, args, kwargs):
            _current.add_wait(str(func))
        plain_args, plain_kwargs = tree_map_only(_OnGPU, lambda each: each.on_host, (args, kwargs))
        compute = _addmm if str(func) == "aten.addmm.dtype_out" else func
        result = tree_map_only(Tensor, _OnGPU, compute(*plain_args, **plain_kwargs))
        return return_and_correct_aliasing(func, args, kwargs, result)


_current: PretendedGPU | None = None


@contextmanager
def pretended_gpu() -> Iterator[PretendedGPU]:
    """Have a GPU for a while."""
    global _current
    before, _current = _current, PretendedGPU()
    run, group = torch.autograd._engine_run_backward, clip_grad._group_tensors_by_device_and_dtype

    def group_tensors(*arguments: Any) -> Any:  # in C++, for which they are on the CPU
        groups = group(*arguments).items()
        return {(each[0][0][0].device, dtype): each for (_, dtype), each in groups}

    def run_backward(*arguments: Any, **keywords: Any) -> Any:
        with gpu:  # a mode is off while it handles a call, such as that of `backward`
            return run(*arguments, **keywords)

    try:
        with (
            _current as gpu,
            mock.patch.object(torch.autograd, "_engine_run_backward", run_backward),
            mock.patch.object(clip_grad, "_group_tensors_by_device_and_dtype", group_tensors),
            _head(gpu),
        ):
            yield gpu
    finally:
        _current = before
        pooling._edges_on.cache_clear()  # a true GPU has the same name


@contextmanager
def _head(gpu: PretendedGPU) -> Iterator[None]:
    """Let TRL's fused LM head take the pretended GPU for a real one.

    It scores the positions with a label only. Triton's interpreter runs its kernels, where Triton is installed
    (`make test-triton`). Elsewhere TRL's loops in torch stand for them.
    """
    if not HAS_INTERPRETER:
        with (
            mock.patch.object(trl.kernels.chunked_logprob, "_TRITON_AVAILABLE", False),
            mock.patch.object(trl.trainer.utils, "_use_triton", lambda device: device.type == "cuda"),
        ):
            yield
        return
    from triton.runtime import interpreter

    def memory(argument: Any) -> Any:
        gpu.kernel_arguments += isinstance(argument, _OnGPU)
        return argument.on_host if isinstance(argument, _OnGPU) else unwrap(argument)

    unwrap = interpreter._unwrap_tensor
    with mock.patch.object(interpreter, "_unwrap_tensor", memory):
        yield


@contextmanager
def on_gpu(trainer: Any) -> Iterator[PretendedGPU]:
    """Have a trainer that was built for the CPU train on a pretended GPU."""
    scorers = [held for feature in trainer.features for held in vars(feature).values() if isinstance(held, Scorer)]
    models = [trainer.model, trainer.ref_model, *(part for each in scorers for part in (each.backbone, each.head))]
    models += [held for part in trainer.features for held in vars(part).values() if isinstance(held, torch.nn.Module)]
    states: list[Any] = [AcceleratorState._shared_state, PartialState._shared_state]
    with pretended_gpu() as gpu, ExitStack() as stack:
        to_gpu(*(model for model in models if model is not None))
        for feature in trainer.features:
            vars(feature).update({key: own.to(CUDA) for key, own in vars(feature).items() if isinstance(own, Tensor)})
        for state in states:
            stack.enter_context(mock.patch.dict(state, {"device": CUDA}))
        vars(trainer.args)["_setup_devices"] = CUDA  # a cached property
        yield gpu


def to_gpu(*models: torch.nn.Module) -> None:
    """Move models to the pretended GPU, which may share modules or parameters."""
    modules = dict.fromkeys(module for model in models for module in model.modules())
    moved: dict[torch.nn.Parameter, torch.nn.Parameter] = {}  # tied ones stay tied
    for module in modules:
        for name, own in [(name, own) for name, own in module._parameters.items() if own is not None]:
            if own not in moved:
                moved[own] = torch.nn.Parameter(own.detach().to(CUDA), requires_grad=own.requires_grad)
            module._parameters[name] = moved[own]
        module._buffers.update({name: own.to(CUDA) for name, own in module._buffers.items() if own is not None})


def _addmm(added: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype, *, out: Tensor) -> Tensor:
    """Implement an overload of `torch.addmm` that CUDA alone has: products of bf16 that are not rounded to bf16."""
    return torch.addmm(added, left.to(dtype), right.to(dtype), out=out)


def _waits(func: Any, args: Any, kwargs: Any) -> bool:
    name = str(func)
    if name.startswith("aten.repeat_interleave"):
        return kwargs.get("output_size") is None
    if name in _INDEXING:  # a mask, whose number of entries nobody knows, or an index to copy
        return any(each is not None and (each.dtype == torch.bool or not isinstance(each, _OnGPU)) for each in args[1])
    if name == "aten.copy_.default":
        return any(not isinstance(each, _OnGPU) for each in args[:2])
    return name.startswith(_WAITING)


def _refuse_mixed(func: Any, args: Any, kwargs: Any) -> None:
    """Raise as CUDA does: beside its tensors it takes numbers, copies from the CPU, and indices on the CPU."""
    name, tensors = str(func), [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    if name in _INDEXING and isinstance(args[0], _OnGPU):
        tensors = [args[0], *args[2:3]]
    on_cpu = [each for each in tensors if not isinstance(each, _OnGPU) and each.dim()]
    if on_cpu and name not in ("aten.copy_.default", "aten._to_copy.default"):
        shapes = [tuple(each.shape) for each in on_cpu]
        raise RuntimeError(
            f"{name}: expected all tensors to be on the same device, found {shapes} on cpu beside cuda."
        )


def bytes_held(*roots: object) -> int:
    """Bytes of the storages that objects keep alive, each one once, however little of it their tensors show."""
    storages: dict[int, int] = {}
    seen: set[int] = set()

    def visit(each: Any) -> None:
        if id(each) in seen:
            return
        seen.add(id(each))
        if isinstance(each, Tensor):
            storage = cast(Tensor, getattr(each, "on_host", each)).untyped_storage()
            storages[storage._cdata] = storage.nbytes()
        elif isinstance(each, Iterable) and not isinstance(each, str | bytes):
            for item in each.values() if isinstance(each, Mapping) else each:
                visit(item)
        elif hasattr(each, "__dict__"):
            visit(vars(each))

    visit(roots)
    return sum(storages.values())
