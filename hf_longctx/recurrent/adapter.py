"""A modeling file whose causal masks know no positions -> one whose masks keep documents apart.

Layer: recurrent. The library's own masks (of eager attention, say) see packed documents by positions
that start again; a file that passes none on leaves them joined.

A recurrent layer class and functions of ours -> instances whose documents stay apart. A layer keeps its own forward: what that calls by name in its modeling file is
replaced by dispatchers, which run our function while a layer with packed documents is under way and
the original, the same object as before, at any other time.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial, wraps
from types import MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from ..data.batch import KEY, LongCtxBatch
from ..runtime.executor import Runtime
from .running import Running, batch_of_block, batch_of_model, layer_under_way, running_layer


def show_documents(home: ModuleType) -> None:
    """Have a modeling file's `create_causal_mask` see the documents of the forward under way.

    Args:
        home (`ModuleType`): The modeling file; a second time changes nothing.
    """
    original: Any = home.create_causal_mask
    if hasattr(original, "hf_longctx_original"):
        return

    @wraps(original)
    def create_causal_mask(*args: Any, inputs_embeds: Any, **kwargs: Any) -> Any:
        batch = batch_of_model()
        if batch is not None:
            own = torch.from_numpy(batch.layout.positions(batch.rank)).to(inputs_embeds.device)
            kwargs["position_ids"] = own.view(inputs_embeds.shape[:2])
        return original(*args, inputs_embeds=inputs_embeds, **kwargs)

    create_causal_mask.hf_longctx_original = original  # type: ignore[attr-defined]
    home.create_causal_mask = create_causal_mask  # type: ignore[attr-defined]


KNOWN = {"transformers": "5.24", "fla": "0.6"}  # versions whose functions ours stand in for


@dataclass(frozen=True, slots=True)
class Replacement:
    """A function of ours that stands in for one of a modeling file.

    Args:
        function (`Callable`): Takes the `Running` layer, then what the original takes.
        parameters (`str`): Names of the original's parameters, as this function was written for.
    """

    function: Callable[..., Any]
    parameters: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """How the layers of one class are made to keep documents apart.

    Args:
        models (`tuple[str, ...]`): Folders of `transformers.models` that have the class.
        layer (`str`): End of its name there.
        functions (`Mapping[str, Replacement]`): By their names in the modeling file.
        steps (`tuple[str, ...]`): What one forward must call, in order; see `Running.begin`.
        forward (`Replacement`, *optional*): Stands in for the layer's own forward.
        carried (`bool`, *optional*): The decoder layer around it hands it no keyword arguments.
        plain (`bool`, *optional*): The layer's own forward runs on a CPU.
        masked (`bool`, *optional*): The model makes the masks of its softmax layers without the
            positions that show where documents start.
    """

    models: tuple[str, ...]
    layer: str
    steps: tuple[str, ...]
    functions: Mapping[str, Replacement] = field(default_factory=dict)
    forward: Replacement | None = None
    carried: bool = False
    plain: bool = True
    masked: bool = False

    def homes(self) -> set[str]:
        """Names of the modeling files that may define the class."""
        return {f"transformers.models.{name}.modeling_{name}" for name in self.models}

    def home(self, module: nn.Module) -> ModuleType | None:
        """The modeling file that defines the module's class, if this adapter is for it."""
        homes = self.homes()
        for kind in type(module).__mro__:  # FSDP and users derive classes of their own
            if kind.__module__ in homes and kind.__name__.endswith(self.layer):
                return sys.modules[kind.__module__]
        return None

    def adapt(self, module: nn.Module, home: ModuleType) -> None:
        """Have one layer run through our functions where it is given packed documents.

        Args:
            module (`nn.Module`): The layer; a second time changes nothing.
            home (`ModuleType`): Its modeling file.

        Raises:
            ValueError: where the library's functions take other arguments than ours know.
        """
        for name, replacement in self.functions.items():
            original: Any = getattr(home, name, None)
            if not hasattr(original, "hf_longctx_original"):
                validate_unknown(f"{home.__name__}.{name}", original, replacement.parameters)
                setattr(home, name, _dispatcher(original, replacement.function))
        if self.forward is not None:
            place = f"{home.__name__}.{type(module).__name__}.forward"
            validate_unknown(place, module.forward, self.forward.parameters)
        if self.masked:
            show_documents(home)
        wrap_forward(module, partial(_forward, adapter=self))

    def expected(self, module: nn.Module) -> tuple[str, ...]:
        """What one forward of the module must call, in order."""
        return self.steps

    def check(self, layer: Running) -> None:
        """Check that a forward went through our functions.

        Raises:
            ValueError: where it did not call exactly those.
        """
        expected, home = self.expected(layer.module), self.home(layer.module)
        if tuple(layer.steps) != expected:
            assert home is not None
            raise ValueError(
                f"{type(layer.module).__name__} called {layer.steps} of hf_longctx where "
                f"{[*expected]} were expected; {_remedy(home.__name__)}"
            )


def _count(layer: Running) -> None:
    """Count a call of a layer; a recompute may end in the middle of it, with what it was for."""
    account = (layer.batch.binding.runtime or Runtime()).account
    if torch._C._current_graph_task_id() != -1:  # inside a backward pass
        account.recomputed += 1
    else:
        account.calls += 1
        account.layers.add(("recurrent", getattr(layer.module, "layer_idx", id(layer.module))))


def wrap_forward(
    module: nn.Module, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Replace the forward of one instance; a second time changes nothing.

    Args:
        module (`nn.Module`): What runs it; nothing of it is saved.
        wrapper (`Callable`): A function that takes the module first -> another such function.

    Raises:
        ValueError: where its forward is no method of it.
    """
    if hasattr(module.forward, "hf_longctx_original"):
        return
    original = getattr(module.forward, "__func__", None)
    if original is None:
        raise ValueError(
            f"forward of {type(module).__name__} was replaced by a "
            f"{type(module.forward).__name__}, so it cannot keep documents apart; load the model "
            "without device_map"
        )
    forward = wraps(original)(wrapper(original))
    forward.hf_longctx_original = original  # type: ignore[attr-defined]
    module.forward = MethodType(forward, module)


def is_wrapped(module: nn.Module) -> bool:
    """Whether a module runs a forward of ours, also under those that others put over it."""
    found = inspect.unwrap(module.forward, stop=lambda f: hasattr(f, "hf_longctx_original"))
    return hasattr(found, "hf_longctx_original")


def validate_unknown(place: str, original: Any, parameters: str) -> None:
    """Refuse a function of the library whose parameters are not those that ours was written for.

    Args:
        place (`str`): Where it is: its module and its name.
        original (`Callable`): The function, or `None` where there is none.
        parameters (`str`): Names of the parameters that ours was written for.

    Raises:
        ValueError: with both lists, and the version that is known.
    """
    found = " ".join(inspect.signature(original).parameters) if original else "no such function"
    if found != parameters:
        raise ValueError(
            f"{place} has parameters ({found}), but hf_longctx knows ({parameters}); "
            f"{_remedy(place)}"
        )


def _remedy(place: str) -> str:
    """What to do where a function or a file of a library is not as it is known."""
    library = place.partition(".")[0]
    version, known = sys.modules[library].__version__, KNOWN[library]
    if f"{version}.".startswith(f"{known}."):
        return f"{library} {version} is known, so something has changed {place} since; undo that"
    return f"{library} is {version}, install {known}"


def _dispatcher(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        layer = layer_under_way()
        return original(*args, **kwargs) if layer is None else ours(layer, *args, **kwargs)

    dispatch.hf_longctx_original = original  # type: ignore[attr-defined]
    return dispatch


def _forward(original: Callable[..., Any], adapter: Adapter) -> Callable[..., Any]:
    """A layer's forward that makes the layer the one under way if it has packed documents."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        batch: LongCtxBatch | None = kwargs.get(KEY) or batch_of_block()
        if batch is None:
            if batch_of_model() is not None:
                raise ValueError(
                    f"{KEY} was lost on its way to {type(self).__name__}, so documents would run "
                    "into each other; have the layers around it hand on their keyword arguments"
                )
            return original(self, *args, **kwargs)
        with running_layer(self, batch) as layer:
            _count(layer)
            if adapter.forward is None:
                out = original(self, *args, **kwargs)
            else:
                out = adapter.forward.function(layer, *args, **kwargs)
        adapter.check(layer)
        return out

    return forward
