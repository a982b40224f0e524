"""Replace what a recurrent layer calls, so that packed documents stay apart in it.

A layer keeps its own forward. The functions that this calls by name in its modeling file are
wrapped: while a layer with packed documents is active our function runs, and at any other time the
original, the same object as before. So models that are not given packed documents are untouched.
Layer: recurrent.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..data.batch import KEY, LongCtxBatch
from ..runtime.executor import Runtime
from ..runtime.wrapping import ORIGINAL, Function, Wrapper, wrap, wrap_forward
from .context import ActiveLayer, activate_layer, active_layer, batch_of_block, batch_of_model

KNOWN = {"transformers": "5.24", "fla": "0.6"}  # versions whose functions ours stand in for

# Accelerate's device_map replaces forwards by closures, in which there is no method to wrap.
wrap_packed_forward = partial(
    wrap_forward, purpose="keep documents apart", remedy="load the model without device_map"
)


@dataclass(frozen=True, slots=True)
class Replacement:
    """A function of ours that stands in for one of a library.

    Args:
        function (`Callable`): Takes the `ActiveLayer`, then what the original takes.
        parameters (`str`): Names of the original's parameters, as this function was written for.
    """

    function: Function
    parameters: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """How the layers of one class are made to keep documents apart.

    Args:
        models (`tuple[str, ...]`): Folders of `transformers.models` that have the class.
        layer (`str`): End of its name there.
        functions (`Mapping[str, Replacement]`): By their names in the modeling file.
        steps (`tuple[str, ...]`): What one forward must call, in order; see `ActiveLayer.begin`.
        forward (`Replacement`, *optional*): Stands in for the layer's own forward.
        drops_kwargs (`bool`, *optional*): The decoder layer around it passes it no keywords.
        needs_gpu (`bool`, *optional*): The layer's own functions do not run on a CPU.
        masks_lack_positions (`bool`, *optional*): The model makes the masks of its softmax layers
            without the positions that show where documents start.
    """

    models: tuple[str, ...]
    layer: str
    steps: tuple[str, ...]
    functions: Mapping[str, Replacement] = field(default_factory=dict)
    forward: Replacement | None = None
    drops_kwargs: bool = False
    needs_gpu: bool = False
    masks_lack_positions: bool = False

    def homes(self) -> set[str]:
        """Return the names of the modeling files that may define the class."""
        return {f"transformers.models.{name}.modeling_{name}" for name in self.models}

    def home(self, module: nn.Module) -> ModuleType | None:
        """Return the modeling file that defines the module's class, if this adapter is for it."""
        homes = self.homes()
        for kind in type(module).__mro__:  # FSDP and users derive classes of their own
            if kind.__module__ in homes and kind.__name__.endswith(self.layer):
                return sys.modules[kind.__module__]
        return None

    def adapt(self, module: nn.Module, home: ModuleType) -> None:
        """Make one layer run our functions when it is given packed documents.

        Args:
            module (`nn.Module`): The layer; a second time changes nothing.
            home (`ModuleType`): Its modeling file.

        Raises:
            ValueError: if the library's functions take other arguments than ours know.
        """
        # In the modeling file, not in the layer: a layer looks its functions up there by name.
        for name, replacement in self.functions.items():
            dispatcher = partial(_dispatcher, ours=replacement.function)
            place = f"{home.__name__}.{name}"
            replace_function(home, name, dispatcher, place=place, known=replacement.parameters)
        if self.forward is not None:
            place = f"{home.__name__}.{type(module).__name__}.forward"
            validate_parameters(place, module.forward, self.forward.parameters)
        if self.masks_lack_positions:
            _give_masks_positions(home)
        wrap_packed_forward(module, partial(_layer_forward, adapter=self))

    def expected(self, module: nn.Module) -> tuple[str, ...]:
        """Return what one forward of the module must call, in order."""
        return self.steps

    def check(self, layer: ActiveLayer) -> None:
        """Check that a forward went through our functions.

        Raises:
            ValueError: if it did not call exactly those.
        """
        # A library that renames a function would run its own, and documents would leak silently.
        expected, home = self.expected(layer.module), self.home(layer.module)
        if tuple(layer.steps) != expected:
            assert home is not None
            raise ValueError(
                f"{type(layer.module).__name__} called {layer.steps} of hf_longctx where "
                f"{[*expected]} were expected; {_remedy(home.__name__)}"
            )


def replace_function(holder: Any, name: str, wrapper: Wrapper, *, place: str, known: str) -> None:
    """Wrap an attribute of a library's module or class; a second time changes nothing.

    Args:
        holder: The module or class.
        name (`str`): The attribute's name.
        wrapper (`Callable`): See `runtime.wrapping.wrap`.
        place (`str`): Dotted name of the function, for the error.
        known (`str`): Names of the parameters that the wrapper was written for.

    Raises:
        ValueError: if the function has others, or does not exist.
    """
    original: Any = getattr(holder, name, None)
    if not hasattr(original, ORIGINAL):
        validate_parameters(place, original, known)
        setattr(holder, name, wrap(original, wrapper))


def validate_parameters(place: str, original: Function | None, known: str) -> None:
    """Reject a library's function whose parameters are not those that ours was written for.

    Args:
        place (`str`): Its dotted name.
        original (`Callable`, *optional*): The function; `None` if there is none.
        known (`str`): Names of the parameters that ours was written for.

    Raises:
        ValueError: with both lists, and the version that is known.
    """
    # All names, in order: a function with a new argument may do what ours does not.
    found = " ".join(inspect.signature(original).parameters) if original else "no such function"
    # The cache of a recurrent layer was called past_key_values before Transformers 5.24.
    if found.replace("past_key_values", "cache") != known:
        raise ValueError(
            f"{place} has parameters ({found}), but hf_longctx knows ({known}); {_remedy(place)}"
        )


def _remedy(place: str) -> str:
    """Say what to do about a function or file of a library that is not as it is known."""
    library = place.partition(".")[0]
    version, known = sys.modules[library].__version__, KNOWN[library]
    if f"{version}.".startswith(f"{known}."):
        return f"{library} {version} is known, so something has changed {place} since; undo that"
    return f"{library} is {version}, install {known}"


def _give_masks_positions(home: ModuleType) -> None:
    """Make a modeling file's `create_causal_mask` see the documents of the active model.

    The library's own masks (of eager attention, say) find packed documents by positions that
    restart. A file that passes no positions on would join the documents.
    """

    def wrapper(original: Function) -> Function:
        def create_causal_mask(*args: Any, inputs_embeds: Any, **kwargs: Any) -> Any:
            batch = batch_of_model()
            if batch is not None:
                own = torch.from_numpy(batch.layout.positions(batch.rank)).to(inputs_embeds.device)
                kwargs["position_ids"] = own.view(inputs_embeds.shape[:2])
            return original(*args, inputs_embeds=inputs_embeds, **kwargs)

        return create_causal_mask

    masks: Any = home
    if not hasattr(masks.create_causal_mask, ORIGINAL):
        masks.create_causal_mask = wrap(masks.create_causal_mask, wrapper)


def _dispatcher(original: Function, *, ours: Function) -> Function:
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        # At each call: a modeling file serves prepared and unprepared models alike.
        layer = active_layer()
        return original(*args, **kwargs) if layer is None else ours(layer, *args, **kwargs)

    return dispatch


def _layer_forward(original: Function, *, adapter: Adapter) -> Callable[..., Any]:
    """Make the layer the active one during its forward if it has packed documents."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Decoder layers that hand no keywords on carry the batch past the layer's arguments.
        batch: LongCtxBatch | None = kwargs.get(KEY) or batch_of_block()
        if batch is None:
            # The model has read documents, so a layer that gets none has lost them.
            if batch_of_model() is not None:
                raise ValueError(
                    f"{KEY} was lost on its way to {type(self).__name__}, so documents would run "
                    "into each other; have the layers around it hand on their keyword arguments"
                )
            return original(self, *args, **kwargs)
        layer = ActiveLayer(self, batch)
        with activate_layer(layer):
            _count(layer)
            if adapter.forward is None:
                out = original(self, *args, **kwargs)
            else:
                out = adapter.forward.function(layer, *args, **kwargs)
        adapter.check(layer)
        return out

    return forward


def _count(layer: ActiveLayer) -> None:
    """Count a call of a layer, before it: a recompute may stop in the middle of the layer."""
    account = (layer.batch.binding.runtime or Runtime()).account
    if torch._C._current_graph_task_id() != -1:  # inside a backward pass
        account.recomputed += 1
    else:
        account.calls += 1
        account.layers.add(("recurrent", getattr(layer.module, "layer_idx", id(layer.module))))
