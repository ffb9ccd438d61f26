"""Teachers in flax's msgpack form: this project's model.msgpack, and CleanRL's .cleanrl_model of its JAX scripts.

This project (format "NAME 1"; all scripts; written with flax.serialization.msgpack_serialize):

    {"format": "ppo_atari 1", "args": JSON of the script's Args, "params": {"params": tree}}
    tree    Conv_i, Dense_0 (hidden), Dense_1 (policy logits, or Q head), and for actor-critics Dense_2 (value)
    Rainbow's head is [width, A * num_atoms]; its args hold num_atoms, v_min, v_max
    In the resnet, Conv_{5k} opens stack k. Flax numbers layers as they are made, and in f(x)(g(y)(z)) makes f before g:
    ActorCritic's blocks have the outer convolution first, so the order of application is 5k, 5k+2, 5k+1, 5k+4, 5k+3.
    A Q network has to number its convolutions likewise, and its dense layers in the order of application.

CleanRL at fe8d8a0 (written with flax.serialization.to_bytes, which turns a list into {"0": ..., "1": ...}):

    dqn_atari_jax, qdagger_dqn_atari_jax_impalacnn    {"params": tree}
    c51_atari_jax                                     {"model_weights": {"params": tree}, "args": {n_atoms, v_min, ...}}
    ppo_atari_envpool_xla_jax_scan                    [args, [network, actor, critic]], each {"params": tree}
"""

import json
from typing import Any

import flax

from .errors import TeacherError, reading
from .network import Layout, Teacher, atoms, choose_layout, layers_of, make_teacher

NATURE = ("Conv_0", "Conv_1", "Conv_2")
OUR_TORSOS = (  # shallow, nature, resnet
    ("Conv_0", "Conv_1"),
    NATURE,
    tuple(f"Conv_{5 * stack + i}" for stack in range(3) for i in (0, 2, 1, 4, 3)),
)
OUR_SCRIPTS = {  # format: kind
    "impact_atari 1": "policy",
    "impala_atari 1": "policy",
    "ppo_atari 1": "policy",
    "qdagger_dqn_atari 1": "q",
    "qdagger_rainbow_atari 1": "c51",
}
OUR_PROTOCOL = "env_id frame_size episodic_life repeat_action_probability max_episode_steps noop_max protocol".split()
CLEANRL_TORSOS = (
    NATURE,
    tuple(
        f"ConvSequence_{stack}/{name}"
        for stack in range(3)
        for name in ("Conv_0", *(f"ResidualBlock_{block}/Conv_{i}" for block in range(2) for i in range(2)))
    ),
)
CLEANRL_PROTOCOL = {"repeat_action_probability": 0.0, "episodic_life": True, "noop_max": 30, "basis": "usual"}


def read_msgpack(data: bytes, source: str, num_actions: int) -> Teacher:
    """A teacher from the bytes of a model.msgpack or a .cleanrl_model."""
    with reading(source):
        tree = flax.serialization.msgpack_restore(data)
        if not isinstance(tree, dict):
            raise TeacherError(f"{source}: no known format; see the table in teachers/__init__.py")
        read = read_ours if "format" in tree else read_cleanrl
        return read(tree, source, num_actions)


def read_ours(tree: dict[str, Any], source: str, num_actions: int) -> Teacher:
    kind = OUR_SCRIPTS.get(tree["format"])
    if kind is None:
        raise TeacherError(f"{source}: format {tree['format']!r} is unknown; known are {', '.join(OUR_SCRIPTS)}")
    args = json.loads(tree["args"])
    if args.get("noisy") or args.get("dueling"):
        raise TeacherError(f"{source}: trained with --noisy or --dueling, which cannot teach yet; train one without")
    layers = layers_of(source, tree["params"]["params"])
    value = "Dense_2" if kind == "policy" else None
    layout = choose_layout(source, layers, [Layout(convs, "Dense_0", "Dense_1", value) for convs in OUR_TORSOS])
    protocol = {name: args[name] for name in OUR_PROTOCOL if name in args} | {"basis": "recorded"}
    support = atoms(source, args["v_min"], args["v_max"], args["num_atoms"]) if kind == "c51" else None
    frame_size = args.get("frame_size", 84)
    return make_teacher(source, kind, layers, layout, num_actions, protocol, support, frame_size)


def read_cleanrl(tree: dict[str, Any], source: str, num_actions: int) -> Teacher:
    args, support, value, head = {}, None, None, "Dense_1"
    match sorted(tree):
        case ["params"]:
            kind, params = "q", tree["params"]
        case ["args", "model_weights"]:
            kind, params, args = "c51", tree["model_weights"]["params"], tree["args"]
            support = atoms(source, args["v_min"], args["v_max"], args["n_atoms"])
        case ["0", "1"] if sorted(tree["1"]) == ["0", "1", "2"]:
            kind, args = "policy", tree["0"]
            network, actor, critic = (tree["1"][i]["params"] for i in "012")
            params = {**network, "actor": actor, "critic": critic}
            head, value = "actor/Dense_0", "critic/Dense_0"
        case names:
            raise TeacherError(
                f"{source}: holds {', '.join(names)[:100]}, which is no known format; choose a model of CleanRL's "
                "dqn_atari_jax, c51_atari_jax or ppo_atari_envpool_xla_jax_scan, or of this project"
            )
    layers = layers_of(source, params)
    layout = choose_layout(source, layers, [Layout(convs, "Dense_0", head, value) for convs in CLEANRL_TORSOS])
    protocol = CLEANRL_PROTOCOL | {name: args[name] for name in ("env_id",) if name in args}
    return make_teacher(source, kind, layers, layout, num_actions, protocol, support)
