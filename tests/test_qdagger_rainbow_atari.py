"""qdagger_rainbow_atari.py: C51, prioritised replay, noisy and dueling networks, and main with all of them.

What it shares with qdagger_dqn_atari.py (replay, distillation, workflows, faults) is one source and tested there."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro_envs import MatchTheBit, RightAction
from micro_qdagger import GAMMA, Micro, action_values, fake_teacher, interrupt_at, params_of, refused, rows_of
from test_qdagger_dqn_atari import columns, played

import qdagger_dqn_atari
import qdagger_rainbow_atari as script

ATOMS = np.linspace(-10, 10, 51)


# --- C51 --------------------------------------------------------------------------------------------------------------
def slow_projection(support, probability, atoms):
    """Bellemare et al. (2017), algorithm 1, for one distribution."""
    out, step = np.zeros(len(atoms)), atoms[1] - atoms[0]
    for value, p in zip(support, probability):
        b = (np.clip(value, atoms[0], atoms[-1]) - atoms[0]) / step
        low, high = int(np.floor(b + 1e-9)), int(np.ceil(b - 1e-9))
        if low == high:
            out[low] += p
        else:
            out[low] += p * (high - b)
            out[high] += p * (b - low)
    return out


def test_projection_by_hand():
    atoms, support = jnp.array([-1.0, 0.0, 1.0]), jnp.array([[-0.5, 0.25, 3.0], [0.0, 0.0, 0.0], [-9.0, -1.0, 1.0]])
    probability = jnp.array([[0.2, 0.4, 0.4], [0.3, 0.3, 0.4], [0.5, 0.25, 0.25]])
    expected = [[0.1, 0.1 + 0.3, 0.1 + 0.4], [0.0, 1.0, 0.0], [0.75, 0.0, 0.25]]
    np.testing.assert_allclose(script.c51_projection(support, probability, atoms), expected, atol=1e-6)


def test_projection_equals_a_slow_loop_and_rlax():
    rng = np.random.default_rng(0)
    probability = rng.dirichlet(np.ones(51), size=64)
    reward, discount = rng.normal(size=64, scale=3), rng.choice([0.0, 0.97], 64)
    support = reward[:, None] + discount[:, None] * ATOMS
    got = script.c51_projection(jnp.array(support, jnp.float32), jnp.array(probability, jnp.float32), jnp.array(ATOMS))
    expected = [slow_projection(*row, ATOMS) for row in zip(support, probability)]
    np.testing.assert_allclose(got, expected, atol=3e-6)
    np.testing.assert_allclose(got.sum(1), 1.0, atol=1e-5)
    rlax = pytest.importorskip("rlax")
    oracle = jax.vmap(rlax.categorical_l2_project, (0, 0, None))
    np.testing.assert_allclose(got, oracle(jnp.array(support), jnp.array(probability), jnp.array(ATOMS)), atol=3e-6)


def test_projection_keeps_the_mean_inside_and_is_the_reward_after_a_termination():
    rng = np.random.default_rng(1)
    probability = rng.dirichlet(np.ones(51), size=16)
    inside = 0.5 + 0.9 * ATOMS[None].repeat(16, 0)
    got = script.c51_projection(jnp.array(inside), jnp.array(probability), jnp.array(ATOMS))
    np.testing.assert_allclose(got @ ATOMS, (probability * inside).sum(1), atol=1e-4)
    ended = script.c51_projection(jnp.full((16, 51), 0.4), jnp.array(probability), jnp.array(ATOMS))
    expected = np.zeros((16, 51))
    expected[:, 26] = 1.0  # 0.4 is that atom
    np.testing.assert_allclose(ended, expected, atol=1e-5)


def made_batch(rng, size=6, actions=3, obs_shape=(4, 2, 2)):
    obs, next_obs = rng.integers(0, 256, (2, size, *obs_shape), np.uint8)
    return script.Transitions(
        obs, rng.integers(0, actions, size), rng.normal(size=size).astype(np.float32),
        rng.choice([0.0, 0.729], size).astype(np.float32), next_obs,
        rng.dirichlet(np.ones(actions), size=size).astype(np.float32),
    )  # fmt: skip


@pytest.mark.parametrize("double", [False, True])
def test_loss_equals_a_plain_reimplementation(double):
    rng, args = np.random.default_rng(2), script.Args(teacher="none", double=double, distill_coef=0.7)
    params, target_params = ({"w": rng.normal(size=(16, 3 * 51)).astype(np.float32)} for _ in range(2))
    apply_fn = lambda params, obs, rngs: (obs.reshape(len(obs), -1) / 255.0 @ params["w"]).reshape(-1, 3, 51)  # noqa: E731
    state = script.QState.create(
        apply_fn=apply_fn, params=params, tx=script.optax.identity(), target_params=target_params
    )
    given, importance = made_batch(rng), rng.random(6).astype(np.float32)

    def softmax(x):
        return np.exp(x - x.max(-1, keepdims=True)) / np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)

    now, later, chooser = (
        softmax(np.asarray(apply_fn(p, o, {}), np.float64))
        for p, o in ((params, given.obs), (target_params, given.next_obs), (params, given.next_obs))
    )
    best = ((chooser if double else later) @ ATOMS).argmax(1)
    loss, priorities = [], []
    for i in range(6):
        support = given.n_step_reward[i] + given.discount[i] * ATOMS
        target = slow_projection(support, later[i, best[i]], ATOMS)
        cross_entropy = -(target * np.log(now[i, given.action[i]])).sum()
        pi = softmax(now[i] @ ATOMS / 0.1)
        kl = (given.teacher_policy[i] * (np.log(given.teacher_policy[i]) - np.log(np.maximum(pi, 1e-300)))).sum()
        loss.append(importance[i] * (cross_entropy + 0.7 * 0.25 * kl))
        priorities.append(np.sqrt(cross_entropy))  # without the distillation
    got, metrics = script.rainbow_loss(params, state, (given, importance), 0.25, args)
    assert got == pytest.approx(np.mean(loss), rel=1e-4)
    np.testing.assert_allclose(metrics["priority"], priorities, rtol=1e-4)


# --- sum tree and priorities ------------------------------------------------------------------------------------------
def test_sum_tree_equals_an_array_over_many_operations():
    rng, leaves = np.random.default_rng(0), 77
    tree, naive = script.SumTree(leaves), np.zeros(leaves)
    for _ in range(100_000 // 8):
        leaf = rng.integers(0, leaves, 8)  # with duplicates: the last one counts
        priority = rng.random(8) * (rng.random(8) < 0.7) * 10.0 ** rng.integers(-3, 4)
        tree.set(leaf, priority)
        for i, p in zip(leaf, priority):
            naive[i] = p
    np.testing.assert_array_equal(tree.nodes[tree.size : tree.size + leaves], naive)
    assert tree.nodes[1] == pytest.approx(naive.sum(), rel=1e-12)
    mass = rng.random(5000) * naive.sum()
    found = tree.find(mass)
    assert naive[found].min() > 0
    edges = np.concatenate([[0.0], np.cumsum(naive)])
    assert (np.abs(np.clip(mass, edges[found], edges[found + 1]) - mass) < 1e-9 * naive.sum()).all()


def test_sum_tree_does_not_drift():
    """After ten million updates of every magnitude the root is still the sum of the leaves, to the last bits."""
    rng, tree = np.random.default_rng(0), script.SumTree(1000)
    for _ in range(1000):
        tree.set(rng.integers(0, 1000, 10_000), 10.0 ** rng.uniform(-8, 8, 10_000))
    tree.set(np.arange(1000), np.full(1000, 1e-6))
    assert tree.nodes[1] == pytest.approx(1e-3, rel=1e-12)


def test_a_batch_from_a_million_takes_well_under_a_millisecond():
    tree, rng = script.SumTree(1_000_000), np.random.default_rng(0)
    tree.set(np.arange(1_000_000), rng.random(1_000_000))
    seconds = []
    for _ in range(200):
        start = time.perf_counter()
        leaf = tree.find(rng.random(32) * tree.nodes[1])
        tree.set(leaf, rng.random(32))
        seconds.append(time.perf_counter() - start)
    assert np.median(seconds) < 1e-3


@pytest.mark.parametrize("steps", [9, 60, 150])
@pytest.mark.parametrize("n", [1, 3])
def test_exactly_the_known_rows_have_a_priority(n, steps):
    """After every step, the ring wrapped round or not: dummy rows, open windows and torn stacks are never drawn."""
    histories, rows = played(3, steps, seed=n), 40
    buffer, rng = script.PrioritizedReplay(n, 3, rows, (2, 3), 3), np.random.default_rng(0)
    for at_once in zip(*histories):
        buffer.add(*columns(at_once))
        env, t = np.indices((3, rows)).reshape(2, -1)
        leaves = buffer.tree.nodes[buffer.tree.size :][: 3 * rows]
        np.testing.assert_array_equal(leaves > 0, buffer.known(env, t, n))
        if leaves.any():
            env, t, weight = buffer.sample_by_priority(rng, (2, 16), 0.5)
            assert buffer.known(env, t, n).all() and (weight.max(axis=1) == 1.0).all()
            buffer.update(env, t, rng.random((2, 16)) + 0.1)


def test_sampling_follows_the_priorities_and_the_weights_correct_for_it():
    buffer, rng = script.PrioritizedReplay(3, 3, 40, (2, 3), 3), np.random.default_rng(0)
    for at_once in zip(*played(3, 100, seed=5)):
        buffer.add(*columns(at_once))
    env, t = np.indices((3, 40)).reshape(2, -1)
    wanted = rng.random(120) * buffer.known(env, t, 3)
    buffer.put(env, t, wanted)
    share, counts = wanted / wanted.sum(), np.zeros(120)
    for _ in range(1000):
        drawn_env, drawn_t, weight = buffer.sample_by_priority(rng, (2, 32), 0.5)
        rows = drawn_env * 40 + drawn_t
        counts += np.bincount(rows.ravel(), minlength=120)
        assert (np.diff(np.cumsum(share)[rows], axis=1) >= 0).all()  # each batch is stratified by itself
        expected = share[rows] ** -0.5
        np.testing.assert_allclose(weight, expected / expected.max(axis=1, keepdims=True), rtol=1e-5)
    assert np.abs(counts - 64_000 * share).max() < 5 * np.sqrt(64_000 * share.max())


def test_a_new_row_enters_with_the_highest_priority_seen():
    buffer, no = script.PrioritizedReplay(1, 1, 40, (2, 3), 3), np.array([False])
    for i in range(5):
        buffer.add(np.zeros((1, 4, 2, 3), np.uint8), [0], [0.0], no, no, no)
        if i == 2:
            buffer.update(np.array([0]), np.array([0]), np.array([7.0]))
    assert buffer.tree.nodes[buffer.tree.size :][:6].tolist() == [7.0, 1.0, 7.0, 7.0, 0.0, 0.0]


# --- networks ---------------------------------------------------------------------------------------------------------
def test_noisy_layer_is_factorised_and_scaled():
    layer, x = script.NoisyDense(64, 0.5), jnp.eye(100)
    params = layer.init(jax.random.key(0), x)
    assert abs(params["params"]["kernel"]).max() <= 0.1 and params["params"]["kernel_sigma"][0, 0] == pytest.approx(
        0.05
    )
    assert params["params"]["bias_sigma"][0] == pytest.approx(0.05)
    mean = layer.apply(params, x)
    np.testing.assert_allclose(mean, params["params"]["kernel"] + params["params"]["bias"], atol=1e-6)
    one, other = (layer.apply(params, x, rngs={"noise": jax.random.key(i)}) - mean for i in (1, 2))
    assert not np.allclose(one, other)
    zero = layer.apply(params, jnp.zeros((1, 100)), rngs={"noise": jax.random.key(1)}) - params["params"]["bias"]
    kernel_noise = np.asarray(one - zero)  # x is the identity: the kernel's noise alone
    singular = np.linalg.svd(kernel_noise, compute_uv=False)
    assert singular[1] < 1e-4 * singular[0]  # an outer product
    draws = jax.vmap(lambda key: layer.apply(params, x, rngs={"noise": key}) - mean)(
        jax.random.split(jax.random.key(3), 200)
    )
    # E[f(e)^2] = E|e| = sqrt(2 / pi), squared for the kernel, and the bias's own beside it
    variance = 0.05**2 * (2 / np.pi + np.sqrt(2 / np.pi))
    assert np.var(draws) == pytest.approx(variance, rel=0.2)


def test_dueling_streams_by_hand():
    """Logits are value + advantage - mean advantage: over the actions they average to the value stream's."""
    network = script.RainbowNetwork("shallow", 3, 5, True, None)
    obs = np.random.default_rng(0).integers(0, 256, (2, 4, 84, 84), np.uint8)
    params = network.init(jax.random.key(0), obs)
    logits = network.apply(params, obs)
    assert logits.shape == (2, 3, 5)
    without = jax.tree.map(np.array, params)
    without["params"]["Dense_1"]["kernel"][:] = 0.0  # no advantages: all actions alike
    without["params"]["Dense_1"]["bias"][:] = 0.0
    value = network.apply(without, obs)
    np.testing.assert_allclose(value, np.repeat(value[:, :1], 3, axis=1), atol=1e-6)
    np.testing.assert_allclose(logits.mean(axis=1), value[:, 0], atol=1e-5)
    assert np.ptp(logits, axis=1).max() > 1e-3


# --- main -------------------------------------------------------------------------------------------------------------
SETTINGS = dict(v_min=-3.0, v_max=3.0, eval_epsilon=0.0, target_period=25)


@pytest.fixture
def micro(monkeypatch, tmp_path):
    def run(*given, size=42, **settings):
        run_main.size = size
        return run_main(*given, **SETTINGS | settings)

    run_main = Micro(script, monkeypatch, tmp_path)
    return run


def values(result, kind):
    def q_values(args, num_actions, params, obs):
        noise = args["noisy_sigma"] if args["noisy"] else None
        network = script.RainbowNetwork(args["network"], num_actions, args["num_atoms"], args["dueling"], noise)
        atoms = jnp.linspace(args["v_min"], args["v_max"], args["num_atoms"])
        return script.expected_value(network.apply(params, obs), atoms)

    return action_values(result, kind, q_values)


OPTIONS = {
    "paper": dict(),
    "uniform": pytest.param(dict(prioritized=False), marks=pytest.mark.slow),
    "full": dict(double=True, dueling=True, noisy=True, total_timesteps=3600),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_rainbow_alone_learns_a_match(micro, options):
    """Every option alone learns it; --noisy explores by its noise, with epsilon 0. With n = 1, since the values of more
    steps are those of the mixture of policies that played, not of the best."""
    settings = dict(total_timesteps=2800, n_step=1, epsilon_decay_steps=1000)
    result = micro(MatchTheBit, **settings | options)
    assert result["eval_return"] > 2.8
    for time_left, bit, q in values(result, MatchTheBit):
        assert q.argmax() == bit
        assert q.max() == pytest.approx(sum(GAMMA**k for k in range(3 - time_left)), abs=0.35)


def test_both_phases(micro, monkeypatch):
    """Offline uniformly with weight 1, online by priority; then weaned."""
    weights, sampled, update = [], [], script.PrioritizedReplay.update
    q_learn = script.q_learn

    def spy_learn(state, batches, *rest):
        weights.append((int(state.step), np.asarray(batches[1])))
        return q_learn(state, batches, *rest)

    def spy_update(self, env, t, priority):
        sampled.append(priority)
        return update(self, env, t, priority)

    monkeypatch.setattr(script, "q_learn", spy_learn)
    monkeypatch.setattr(script.PrioritizedReplay, "update", spy_update)
    settings = dict(offline_steps=200, total_timesteps=1200, iteration_steps=400, epsilon=0.1)
    result = micro(MatchTheBit, fake_teacher(), **settings)
    assert all((weight == 1.0).all() for step, weight in weights if step < 200)
    assert any((weight < 1.0).any() for step, weight in weights if step > 220)
    assert len(sampled) == len(weights) - 200 // 50 - 1  # every online batch but the last, whose step nobody follows
    assert np.ptp(np.concatenate(sampled)) > 0.1
    assert result["eval_return"] > 2.8 and rows_of(result, "charts/distill_weight")[1200] == 0.0


@pytest.mark.slow
def test_resume_offline_gives_the_very_same_student(micro, monkeypatch):
    settings = dict(offline_steps=100, total_timesteps=0, noisy=True)
    whole = micro(MatchTheBit, fake_teacher(), **settings)
    undo = interrupt_at(script, monkeypatch, 50)
    part = micro(MatchTheBit, fake_teacher(), **settings)
    undo()
    rest = micro(MatchTheBit, fake_teacher(), resume=str(part["run_dir"]), **settings)
    jax.tree.map(np.testing.assert_array_equal, params_of(whole), params_of(rest))


@pytest.mark.slow
def test_a_rainbow_is_fine_tuned_by_priority(micro):
    first = micro(RightAction, total_timesteps=800, save_replay=True, epsilon_decay_steps=400, size=84)
    settings = dict(finetune=str(first["run_dir"]), teacher=None, learning_starts=40, size=84)
    tuned = micro(RightAction, total_timesteps=80, **settings)
    assert tuned["eval_return"] > 0.9


def test_bad_flags(capsys, micro):
    refused(capsys, lambda: script.Args(v_min=1.0, v_max=1.0), "--num-atoms, --v-min, --v-max: need two atoms")
    refused(capsys, lambda: script.Args(num_atoms=1), "--num-atoms, --v-min, --v-max")
    refused(capsys, lambda: script.Args(importance_exponent=-1.0), "--importance-exponent -1.0")
    folder = str(micro(RightAction, total_timesteps=240)["run_dir"])
    refused(
        capsys, lambda: micro(RightAction, finetune=folder, teacher=None, dueling=True), "--dueling True: --finetune"
    )


def test_the_two_scripts_share_their_settings():
    """What both have, they have alike, but for what the paper sets differently."""
    ours, theirs = vars(script.Args()), vars(qdagger_dqn_atari.Args())
    differ = {name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}
    assert differ == {"network", "wean_steps", "distill_coef"} | ({"exp_name"} if ours["exp_name"] else set())
    assert theirs.keys() <= ours.keys()
