"""Pickles that call, construct or replace something, and pickles that only keep such a thing."""

from __future__ import annotations

from pickle_assembler import (
    BOX_IOU,
    BROKEN,
    GELU,
    LARGE,
    LINEAR,
    MATCHER,
    NAMES,
    ORDERED,
    PARTIAL,
    REBUILD,
    RELU,
    WRONG,
    Maker,
    call,
    get,
    module,
    name,
    new,
    partial,
    put,
    storage,
    tensor,
    value,
    zipped,
)


def _late(field: str, key: str, late: bytes) -> bytes:
    """A container is filled after the module that has it was built."""
    container = call(ORDERED) + put(7)
    return module(**{field: container}) + get(7) + value(key) + late + b"s0"


def _recurrent(**more: object) -> bytes:
    state = {"_all_weights": [[None]], "num_layers": 1, "bidirectional": False, "bias": True}
    return module("torch.nn.modules.rnn:LSTM", **{**state, "proj_size": 0, **more})


REPLACES = "whose state replaces its"
NOT_SAVED = "in a way that torch.save does not"
KEPT = "which torch.save only keeps"


CALLS: dict[str, tuple[Maker, str]] = {
    # constructors and calls
    "allocate by a constructor": (zipped(call(LINEAR, 30_000, 30_000)), "calls Linear"),
    "loop in a constructor": (
        zipped(call("torch.nn.modules.transformer:Transformer", 8, 2, 10**7)),
        "calls Transformer",
    ),
    "a constructor that calls its argument": (
        zipped(call("torchvision.ops.misc:Conv2dNormActivation", 3, 3, 1, 1, 0, 1, LARGE)),
        "calls Conv2dNormActivation",
    ),
    "arguments to __new__": (zipped(new(LINEAR, None, 30_000, 30_000)), NOT_SAVED),
    "call a partial": (zipped(call(LARGE)), "calls partial"),
    "call a stored function": (zipped(call(BOX_IOU, 1, 2)), KEPT),
    "call a builtin": (zipped(call(GELU, 1)), KEPT),
    "make a stored function": (zipped(new(BOX_IOU)), NOT_SAVED),
    "call a helper": (zipped(call(MATCHER, 0.7, 0.3)), "calls Matcher"),
    "call a type": (zipped(call("torch:float32")), "calls dtype"),
    "call a storage": (zipped(call("torch:FloatStorage", 10**12)), "calls StorageType"),
    "call a tensor class": (zipped(call("torch:Tensor", 10**6, 10**6)), "calls Tensor"),
    "call an old tensor class": (zipped(call("torch:FloatTensor", 10**12)), NAMES),
    "call an instance": (zipped(call(module(), 1)), "calls ReLU"),
    "a partial of a function": (zipped(call(PARTIAL, name(BOX_IOU))), "functools.partial of some"),
    "a partial of a partial": (zipped(call(PARTIAL, partial())), "functools.partial of some"),
    "a partial with a class": (
        zipped(partial(eps=name(LINEAR))),
        "functools.partial with other arguments",
    ),
    "a partial that becomes another": (
        zipped(call(PARTIAL, name(RELU)) + value((name(LINEAR), (1, 1), {}, None)) + b"b"),
        "functools.partial with other arguments",
    ),
    "a partial with attributes": (
        zipped(call(PARTIAL, name(RELU)) + value((name(RELU), (), {}, {"func": 1})) + b"b"),
        "functools.partial with other arguments",
    ),
    "range as a source": (
        zipped(call("collections:Counter", call("builtins:range", 10**12))),
        NAMES,
    ),
    "a generator of bytes": (zipped(call("builtins:bytearray", 10**12)), WRONG),
    "decompress while encoding": (zipped(call("_codecs:encode", "x", "zlib")), "encodes text"),
    "import by a codec": (zipped(call("_codecs:encode", "x", "marker")), "encodes text"),
    "a tensor of a class": (
        zipped(
            call(
                "torch._tensor:_rebuild_from_type_v2",
                name(LINEAR),
                name("torch:Tensor"),
                (9, 9),
                {},
            )
        ),
        WRONG,
    ),
    "a wrapper subclass": (zipped(call("torch._utils:_rebuild_wrapper_subclass")), NAMES),
    "a tensor from numpy": (zipped(call("torch._utils:_rebuild_device_tensor_from_numpy")), NAMES),
    "an extra state by a call": (
        zipped(module(note=call("torch.hub:load", "x"))),
        "needs torch.hub.load",
    ),
    "a class of torch.nn.cpp": (
        zipped(new("torch.nn.cpp:ModuleWrapper", {"cpp_module": 1})),
        "needs torch.nn.cpp.ModuleWrapper",
    ),
    "a class that joins a process group": (
        zipped(new("torch.nn.parallel.distributed:DistributedDataParallel", {})),
        "needs torch.nn.parallel.distributed.DistributedDataParallel",
    ),
    "a class that packs weights": (
        zipped(new("torch.ao.nn.quantized.modules.conv:Conv2d", (1, 2))),
        "is a statically quantised model saved whole, which torch cannot load",
    ),
    "a graph": (zipped(new("torch.fx.graph_module:GraphModule", {})), NAMES),
    "a script": (zipped(new("torch.jit._script:ScriptModule", {})), NAMES),
    "a lazy parameter": (zipped(call("torch.nn.parameter:UninitializedParameter", True)), NAMES),
    "hide behind a compiler": (
        zipped(
            call(
                "torch._dynamo.eval_frame:OptimizedModule",
                module(note=call("os:mkdir", "marker")),
                None,
            )
        ),
        "needs os.mkdir",
    ),
    "a compiled number": (
        zipped(call("torch._dynamo.eval_frame:OptimizedModule", 5, None)),
        WRONG,
    ),
    # state
    "replace forward by a function": (zipped(module(forward=name(BOX_IOU))), f"{REPLACES} forward"),
    "replace forward by a class": (zipped(module(forward=name(LINEAR))), f"{REPLACES} forward"),
    "replace forward by a number": (zipped(module(forward=5)), f"{REPLACES} forward"),
    "replace register_forward_hook": (
        zipped(module(register_forward_hook=LARGE)),
        f"{REPLACES} register_forward_hook",
    ),
    "replace state_dict": (zipped(module(state_dict=LARGE)), f"{REPLACES} state_dict"),
    "replace __class__": (zipped(module(__class__=name(LINEAR))), f"{REPLACES} __class__"),
    "replace a dunder": (
        zipped(module(__torch_function__=LARGE)),
        f"{REPLACES} __torch_function__",
    ),
    "replace the compiled call": (
        zipped(module(_compiled_call_impl=LARGE)),
        f"{REPLACES} _compiled_call_impl",
    ),
    "replace a call of a helper": (
        zipped(new(MATCHER, {"__call__": LARGE})),
        f"{REPLACES} __call__",
    ),
    "replace a property": (
        zipped(module("torch.nn.modules.activation:MultiheadAttention", merge_masks=LARGE)),
        f"{REPLACES} merge_masks",
    ),
    "a name of two lines": (zipped(module(**{"__a\nerror: b": 1})), "its __a\\nerror: b"),
    "a function as a hook": (
        zipped(module(_forward_hooks={1: name(BOX_IOU)})),
        "with _forward_hooks, which would call",
    ),
    "a class as a hook": (
        zipped(module(_backward_hooks={1: name(LINEAR)})),
        "with _backward_hooks, which would call",
    ),
    "a partial as a hook": (
        zipped(module(_state_dict_hooks={1: LARGE})),
        "with _state_dict_hooks, which would call",
    ),
    "a module as a hook": (
        zipped(module(_load_state_dict_pre_hooks={1: module()})),
        "with _load_state_dict_pre_hooks, which would call",
    ),
    "hooks of another type": (zipped(module(_forward_hooks=[])), BROKEN),
    "hooks that come late": (
        zipped(_late("_forward_hooks", "x", name(BOX_IOU))),
        "with _forward_hooks, which would call",
    ),
    "parts that come late": (zipped(_late("_modules", "x", value(5))), BROKEN),
    "a mode that is a word": (zipped(module(training="no")), BROKEN),
    "a set that is a list": (zipped(module(_non_persistent_buffers_set=[])), BROKEN),
    "a module for a parameter": (zipped(module(_parameters={"w": module()})), BROKEN),
    "a storage for a buffer": (zipped(module(_buffers={"b": storage()})), BROKEN),
    "a helper for a module": (zipped(module(_modules={"m": new(MATCHER, {})})), BROKEN),
    "a part without a name": (zipped(module(_modules={5: module()})), BROKEN),
    "state that is a tuple": (zipped(new(RELU, (1, 2))), "its state is no dict"),
    "state without names": (zipped(new(RELU, {1: 2})), "its state is no dict"),
    "no state at all": (zipped(new(RELU)), BROKEN),
    "state of a tensor": (zipped(tensor((1,), (1,)) + value({}) + b"b"), "a Tensor takes no state"),
    "layers without end": (zipped(_recurrent(num_layers=10**12)), BROKEN),
    "layers that are words": (zipped(_recurrent(num_layers="9")), BROKEN),
    "weights of no name": (zipped(_recurrent(_flat_weights_names=[1])), BROKEN),
    "weights of no list": (zipped(_recurrent(_all_weights=5)), BROKEN),
}
"""Calls, constructors and states: what each attempts, and what the line says of it."""


KEPT_AS_DATA: dict[str, tuple[Maker, str]] = {
    "methods of a dict replaced": (
        zipped(call(ORDERED) + value({"items": LARGE, "keys": LARGE}) + b"b"),
        "holds no weights: nothing",
    ),
    "attributes of a parameter": (
        zipped(
            call(
                "torch._utils:_rebuild_parameter_with_state",
                tensor((1,), (1,)),
                True,
                call(ORDERED),
                {"data": LARGE, "note": name(BOX_IOU)},
            )
        ),
        "holds no weights: a Parameter",
    ),
    "hooks of a tensor": (
        zipped(
            call(REBUILD, storage(), 0, (1,), (1,), True, call(ORDERED, [["x", name(BOX_IOU)]]))
        ),
        "holds no weights: a Tensor",
    ),
    "a pickle in another case beside it": (
        zipped(b"}", **{"a/DATA.PKL": b"\x80\x02" + call("os:mkdir", "marker") + b"."}),
        "holds no weights: nothing",
    ),
    "constants in another case": (
        zipped(b"}", **{"a/CONSTANTS.PKL": b"x", "a/code/x.py": b"x"}),
        "holds no weights: nothing",
    ),
    "a function kept in a list": (zipped(value([name(BOX_IOU)])), "holds no weights: a list"),
}
"""What harms nobody is read, and is no model."""
