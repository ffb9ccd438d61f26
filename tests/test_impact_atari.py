"""IMPACT: the mathematics against slow loops and rlax, the circular buffer, the masks, and learning through `main`."""

from dataclasses import replace
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from micro_envs import MatchTheBit, install
from traces import CLOSE, dirty, log_softmax, random_columns, random_trace, slow_v_gae, tiny_apply, tiny_params

import impact_atari as script
from impact_atari import ActorCritic, Args, Rollout, TrainState, impact_loss, log_ratio, surrogate, v_gae


@pytest.mark.parametrize("lambda_, c_bar", [(0.0, 1.0), (0.8, 1.0), (1.0, 1.0), (0.8, 2.0)])
def test_v_gae_equals_the_slow_loop(lambda_, c_bar):
    rng = np.random.default_rng(0)
    for _ in range(50):
        trace = random_trace(rng)
        for fast, slow in zip(v_gae(*trace, lambda_, c_bar), slow_v_gae(*trace, lambda_, c_bar)):
            np.testing.assert_allclose(fast, slow, **CLOSE)


def test_v_gae_by_hand():
    """Rows: a step, a truncation, its dummy row, a termination on the rollout's edge. w = 1, lambda = 1/2."""
    value, reward = np.array([1.0, 2.0, 4.0, 8.0, 100.0]), np.array([1.0, 1.0, 99.0, 3.0])
    discount, cut = np.array([0.5, 0.5, 0.5, 0.0]), np.array([False, True, False, True])
    advantage, target = v_gae(value, reward, discount, cut, np.zeros(4), 0.5)
    # t=3: 3 - 8 = -5.  t=1: 1 + 4/2 - 2 = 1, bootstraps from the true last observation.  t=0: 1 + 2/2 - 1 + 1/4 = 1.25.
    np.testing.assert_allclose(np.array(advantage)[[0, 1, 3]], [1.25, 1.0, -5.0])
    np.testing.assert_allclose(np.array(target)[[0, 1, 3]], [2.25, 3.0, 3.0])


@pytest.mark.parametrize("lambda_", [0.7, 1.0])
def test_v_gae_equals_rlax(lambda_):
    rlax = pytest.importorskip("rlax")
    rng = np.random.default_rng(1)
    for _ in range(10):
        value, reward, discount, _, log_w = random_trace(rng)
        ours, target = v_gae(value, reward, discount, discount == 0, log_w, lambda_)
        theirs = rlax.vtrace_td_error_and_advantage(
            jnp.array(value[:-1]), jnp.array(value[1:]), jnp.array(reward), jnp.array(discount), jnp.exp(log_w), lambda_
        )
        np.testing.assert_allclose(ours, theirs.errors, **CLOSE)
        np.testing.assert_allclose(target - value[:-1], theirs.errors, **CLOSE)
        np.testing.assert_allclose(ours, theirs.pg_advantage, **CLOSE)
        on_policy, _ = v_gae(value, reward, discount, discount == 0, np.zeros_like(log_w), lambda_)
        gae = rlax.truncated_generalized_advantage_estimation(
            jnp.array(reward), jnp.array(discount), lambda_, jnp.array(value)
        )
        np.testing.assert_allclose(on_policy, gae, **CLOSE)


def test_lambda_stays_out_of_the_discount():
    """Reward 1 for ever has the fixed point V = 1 / (1 - gamma), whatever lambda is."""
    T, value = 40, np.full(41, 200.0)
    _, target = v_gae(value, np.ones(T), np.full(T, 0.995), np.zeros(T, bool), np.zeros(T), 0.995)
    np.testing.assert_allclose(target, 200.0, rtol=1e-5)


def test_ratio_in_both_of_its_forms():
    rng = np.random.default_rng(2)
    pi, target, worker = rng.uniform(0.01, 1.0, (3, 1000))
    logs = np.log([pi, target, worker])
    for rho in (1.0, 2.0, 5.0):
        ratio = np.exp(log_ratio(*logs, "impact", rho))
        np.testing.assert_allclose(ratio, pi / np.maximum(target, worker / rho), **CLOSE)
        np.testing.assert_allclose(ratio, np.minimum(worker / target, rho) * pi / worker, **CLOSE)
    np.testing.assert_allclose(np.exp(log_ratio(*logs, "target", 2.0)), pi / target, **CLOSE)
    np.testing.assert_allclose(np.exp(log_ratio(*logs, "worker", 2.0)), pi / worker, **CLOSE)


def test_surrogate():
    for ratio, advantage, expected in [(1.5, 1, 1.3), (0.5, 1, 0.5), (1.5, -1, -1.5), (0.5, -1, -0.7), (1, 2, 2)]:
        np.testing.assert_allclose(surrogate(jnp.float32(ratio), jnp.float32(advantage), 0.3), expected, rtol=1e-6)
    rlax = pytest.importorskip("rlax")
    rng = np.random.default_rng(3)
    ratio, advantage = jnp.array(np.exp(rng.normal(size=100))), jnp.array(rng.normal(size=100))
    theirs = rlax.clipped_surrogate_pg_loss(ratio, advantage, 0.3)
    np.testing.assert_allclose(-surrogate(ratio, advantage, 0.3).mean(), theirs, **CLOSE)


# --- the loss ---------------------------------------------------------------------------------------------------------


def random_batch(rng, worker, **shape) -> Rollout:
    return Rollout(**random_columns(rng, worker, **shape))


def tiny_state(params, target, kl_coef=0.0):
    tx = optax.chain(optax.clip_by_global_norm(10.0), optax.adam(1e-2))
    state = TrainState.create(
        apply_fn=tiny_apply, params=params, tx=tx, target_params=target, kl_coef=np.float32(kl_coef)
    )
    return jax.device_put(jax.tree.map(np.array, state))


@pytest.mark.parametrize("norm_adv", [False, True])
@pytest.mark.parametrize("ratio", ["impact", "target", "worker"])
def test_loss_equals_numpy(ratio, norm_adv):
    rng = np.random.default_rng(4)
    live, target, worker = (tiny_params(rng) for _ in range(3))
    args = Args(ratio=ratio, norm_adv=norm_adv, kl_coef=0.7, gae_lambda=0.9)
    rollout = random_batch(rng, worker)
    batch = script.evaluate_batch(tiny_state(live, target), rollout, args)
    loss, metrics = impact_loss(live, tiny_state(live, target, 0.7), batch, args)

    B, T = rollout.mask.shape
    x = rollout.obs.reshape(B, T + 1, 6) / 255.0
    log_live, log_target = log_softmax(x @ np.array(live["policy"])), log_softmax(x @ np.array(target["policy"]))
    rows = []
    for b in range(B):
        taken = [log_target[b, t, rollout.action[b, t]] for t in range(T)]
        advantage, goal = slow_v_gae(
            x[b] @ np.array(target["value"]), rollout.reward[b], rollout.discount[b], rollout.cut[b],
            np.array(taken) - rollout.logp[b], 0.9,
        )  # fmt: skip
        rows += [(b, t, advantage[t], goal[t]) for t in range(T) if rollout.mask[b, t]]
    advantages = np.array([row[2] for row in rows])
    if norm_adv:
        advantages = (advantages - advantages.mean()) / np.sqrt(advantages.var() + 1e-8)
    policy, value, entropy, kl = [], [], [], []
    for (b, t, _, goal), advantage in zip(rows, advantages):
        a = rollout.action[b, t]
        pi, pi_target, pi_worker = np.exp([log_live[b, t, a], log_target[b, t, a], rollout.logp[b, t]])
        r = {"impact": pi / max(pi_target, pi_worker / 2), "target": pi / pi_target, "worker": pi / pi_worker}[ratio]
        policy.append(min(r * advantage, np.clip(r, 0.7, 1.3) * advantage))
        value.append((x[b, t] @ np.array(live["value"]) - goal) ** 2 / 2)
        entropy.append(-(np.exp(log_live[b, t]) * log_live[b, t]).sum())
        kl.append((np.exp(log_target[b, t]) * (log_target[b, t] - log_live[b, t])).sum())
    expected = -np.mean(policy) + np.mean(value) - 0.01 * np.mean(entropy) + 0.7 * np.mean(kl)
    np.testing.assert_allclose(loss, expected, rtol=2e-5)
    np.testing.assert_allclose(metrics["losses/kl_target_live"], np.mean(kl), rtol=2e-5)
    np.testing.assert_allclose(metrics["losses/entropy"], np.mean(entropy), rtol=2e-5)


def test_zero_lag_impact_is_ppo():
    """Worker = target = live, one minibatch: loss and gradient are those of PPO with GAE, written independently."""
    rng = np.random.default_rng(5)
    params = tiny_params(rng)
    args = Args(gae_lambda=0.95, clip_coef=0.2, vf_coef=0.5)
    rollout = random_batch(rng, params)
    batch = script.evaluate_batch(tiny_state(params, params), rollout, args)
    impact = jax.value_and_grad(lambda p: impact_loss(p, tiny_state(params, params), batch, args)[0])

    B, T = rollout.mask.shape
    advantage, last = np.zeros((B, T)), np.zeros(B)
    value = np.array(tiny_apply(params, rollout.obs.reshape(-1, 1, 2, 3))[1]).reshape(B, T + 1)
    for t in reversed(range(T)):
        delta = rollout.reward[:, t] + rollout.discount[:, t] * value[:, t + 1] - value[:, t]
        last = delta + rollout.discount[:, t] * 0.95 * np.where(rollout.cut[:, t], 0, last)
        advantage[:, t] = last
    keep = rollout.mask.reshape(-1)

    def ppo(p):
        logits, v = tiny_apply(p, rollout.obs[:, :-1].reshape(B * T, 1, 2, 3)[keep])
        log_pi = jax.nn.log_softmax(logits)
        old = jax.nn.log_softmax(tiny_apply(params, rollout.obs[:, :-1].reshape(B * T, 1, 2, 3)[keep])[0])
        picked = jax.nn.one_hot(rollout.action.reshape(-1)[keep], 4)
        r = jnp.exp(jnp.sum((log_pi - old) * picked, axis=1))
        adv, goal = advantage.reshape(-1)[keep], (advantage + value[:, :-1]).reshape(-1)[keep]
        pg = jnp.maximum(-adv * r, -adv * jnp.clip(r, 0.8, 1.2)).mean()
        return pg + 0.5 * 0.5 * ((v - goal) ** 2).mean() + 0.01 * (jnp.exp(log_pi) * log_pi).sum(1).mean()

    # At the worker's own parameters the ratio is 1; a step away the clip acts, and the two must still agree.
    step_away = jax.tree.map(lambda x: x + 0.3 * jnp.array(rng.normal(size=x.shape), jnp.float32), params)
    for p in (params, step_away):
        (ours, our_grad), (theirs, their_grad) = impact(p), jax.value_and_grad(ppo)(p)
        np.testing.assert_allclose(ours, theirs, **CLOSE)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), our_grad, their_grad)


def test_masked_rows_have_no_influence():
    """NaN in their rewards and log-probs, other actions and frames: not a bit of loss and gradient may change."""
    rng = np.random.default_rng(6)
    live, target, worker = (tiny_params(rng) for _ in range(3))
    args = Args(norm_adv=True, kl_coef=1.0)
    clean = random_columns(rng, worker, B=8, T=20)
    clean["discount"] = np.where(clean["cut"], 0.0, clean["discount"])  # terminations: no row needs the dummy's frame

    def loss_and_grad(rollout):
        batch = script.evaluate_batch(tiny_state(live, target), rollout, args)
        grad_fn = jax.value_and_grad(impact_loss, has_aux=True)
        (loss, metrics), grads = grad_fn(live, tiny_state(live, target, 1.0), batch, args)
        return loss, metrics, grads

    filthy = Rollout(**dirty(rng, clean))
    jax.tree.map(np.testing.assert_array_equal, loss_and_grad(Rollout(**clean)), loss_and_grad(filthy))


def test_a_truncation_bootstraps_from_the_dummy_rows_frame():
    """The dummy row is out of every loss, but its observation is the true last one of the truncated episode."""
    rng = np.random.default_rng(7)
    params = tiny_params(rng)
    rollout = random_batch(rng, params, B=1, T=3, end_probability=0.0)
    rollout.cut[0, 0], rollout.mask[0, 1] = True, False
    changed = replace(rollout, obs=rollout.obs.copy())
    changed.obs[0, 1] = 255 - changed.obs[0, 1]
    a, b = (script.evaluate_batch(tiny_state(params, params), r, Args()).value_target for r in (rollout, changed))
    assert abs(a[0, 0] - b[0, 0]) > 1e-3
    ended = replace(changed, discount=np.where(changed.cut, 0, changed.discount).astype(np.float32))
    c = script.evaluate_batch(tiny_state(params, params), ended, Args()).value_target
    np.testing.assert_allclose(c[0, 0], rollout.reward[0, 0], rtol=1e-5)


def test_kl_weight_adapts_and_target_is_a_copy():
    params = tiny_params(np.random.default_rng(8))
    for kl, factor in [(0.09, 1.5), (0.05, 1.0), (0.03, 1.0), (0.01, 0.5)]:
        args = Args(kl_coef=2.0, kl_target=0.04)
        state = tiny_state(params, tiny_params(np.random.default_rng(9)), kl_coef=2.0)
        state = script.end_generation(state, (jnp.float32(kl),), args, update_target=True)
        np.testing.assert_allclose(state.kl_coef, 2.0 * factor)
        jax.tree.map(np.testing.assert_array_equal, state.target_params, params)
        state = script.end_generation(state, (jnp.float32(kl),), args, True)  # shared memory would be an error: donated
    target = tiny_params(np.random.default_rng(9))
    state = script.end_generation(
        tiny_state(params, target, kl_coef=2.0), (jnp.float32(0.09),), args, update_target=False
    )
    np.testing.assert_allclose(state.kl_coef, 3.0)
    jax.tree.map(np.testing.assert_array_equal, state.target_params, target)


# --- the circular buffer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("N, K, period", [(1, 2, 1), (3, 4, 1), (2, 2, 3)])
def test_main_visits_swaps_and_caches_as_specified(monkeypatch, tmp_path, N, K, period):
    """What `main` really does: K visits of each batch, round-robin; the target moves every period * N * K visits and at
    no other time; on a later visit the target's evaluation, recomputed, is still what the batch holds."""
    install(monkeypatch, script, MatchTheBit)
    learn, end_generation, events, swaps = script.learn, script.end_generation, [], []

    def spy_learn(state, batch, rows, loss_fn, args):
        again = script.evaluate_batch(state, batch.rollout, args)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), again, batch)
        target = np.concatenate([np.ravel(x) for x in jax.tree.leaves(state.target_params)])
        fingerprint = int(np.array(batch.rollout.logp).view(np.uint32).sum())
        events.extend([(fingerprint, target)] * len(rows))  # with one minibatch a visit is one SGD step
        return learn(state, batch, rows, loss_fn, args)

    def spy_end(state, kl, args, update_target):
        swaps.extend([len(events)] * update_target)
        live = jax.tree.map(np.array, state.params)
        state = end_generation(state, kl, args, update_target)
        if update_target:
            jax.tree.map(np.testing.assert_array_equal, state.target_params, live)
        return state

    monkeypatch.setattr(script, "learn", spy_learn)
    monkeypatch.setattr(script, "end_generation", spy_end)
    generations = 2 * period + 1
    args = Args(frame_size=42, num_envs=2, num_steps=4, buffer_size=N, passes=K, target_period=period, eval_episodes=0,
                total_timesteps=generations * N * 8, runs_dir=str(tmp_path), learning_rate=0.01)  # fmt: skip
    script.main(args)

    assert len(events) == generations * N * K
    batches = [batch for batch, _ in events]
    assert len(set(batches)) == generations * N
    for g in range(generations):
        one = batches[g * N * K : (g + 1) * N * K]
        assert one == one[:N] * K
    assert swaps == [period * N * K * (i + 1) for i in range(generations // period)]
    for i in range(1, len(events)):
        assert (events[i][1] != events[i - 1][1]).any() == (i in swaps)


@pytest.mark.parametrize("B, T", [(8, 1), (8, 8), (8, 33), (3, 129), (100, 20)])
def test_frames_in_pieces_are_frames_at_once(B, T):
    """One piece, several, a short last one, more than 64 environments: every frame's output stands at its own place."""
    rng = np.random.default_rng(11)
    params, obs = tiny_params(rng), rng.integers(0, 256, (B, T, 1, 2, 3), dtype=np.uint8)
    at_once = jax.tree.map(lambda x: x.reshape(B, T, *x.shape[1:]), tiny_apply(params, obs.reshape(-1, 1, 2, 3)))
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), script.forward(tiny_apply, params, obs), at_once
    )


def test_rows_are_dealt_evenly_and_each_exactly_once():
    args = Args(num_steps=12, num_minibatches=3)
    rows = script.deal_rows(np.random.default_rng(0), 4, 5, args)
    assert rows.shape == (12, 5, 4)
    for visit in rows.reshape(4, 3, 5, 4):
        for env in range(5):
            np.testing.assert_array_equal(np.sort(visit[:, env].ravel()), np.arange(12))
    assert (rows[0] != rows[3]).any() and (rows[0, 0] != rows[0, 1]).any()  # shuffled anew, each environment by itself


def trained(monkeypatch, live=False, rolled=False):
    rng = np.random.default_rng(10)
    live_params, target, worker = (tiny_params(rng, 0.3) for _ in range(3))
    args = Args(num_envs=5, num_steps=8, num_minibatches=2, value_target="live" if live else "target", gae_lambda=0.9)
    state, rollout = tiny_state(live_params, target), random_batch(rng, worker)
    batch = script.evaluate_batch(state, rollout, args)
    rows = script.deal_rows(np.random.default_rng(1), 2, 5, args)
    learn = script.sgd_steps_in_one_call if rolled else script.learn
    if live:
        batch = script.evaluate_batch(state, batch.rollout, args, batch.target_logits)
    state, metrics = learn(state, batch, rows, impact_loss, args)
    return batch, jax.device_get((state.params, metrics)), (live_params, rollout, rows, args)


def test_one_call_on_an_accelerator_equals_the_loop_on_a_cpu(monkeypatch):
    (_, loop, _), (_, one_call, _) = trained(monkeypatch), trained(monkeypatch, rolled=True)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), loop, one_call)


def test_the_live_critic_evaluates_where_it_is_asked_to(monkeypatch):
    """The value loss of the first SGD step, with advantages recomputed by the slow loop from the live critic."""
    _, (_, metrics), (params, rollout, rows, args) = trained(monkeypatch, live=True)
    batch, (_, other), _ = trained(monkeypatch)
    value = rollout.obs.reshape(5, 9, 6) / 255.0 @ np.array(params["value"])
    errors = []
    for b in range(5):
        log_target = np.array(nn.log_softmax(batch.target_logits[b]))[np.arange(8), rollout.action[b]]
        trace = (rollout.reward[b], rollout.discount[b], rollout.cut[b], log_target - rollout.logp[b])
        _, goal = slow_v_gae(value[b], *trace, 0.9)
        errors += [(value[b, t] - goal[t]) ** 2 / 2 for t in rows[0, b] if rollout.mask[b, t]]
    np.testing.assert_allclose(metrics["losses/value_loss"][0], np.mean(errors), rtol=1e-5)
    assert abs(other["losses/value_loss"][0] - np.mean(errors)) > 1e-3


@pytest.mark.parametrize(
    "network, frame, count",
    [("shallow", 84, 677_943), ("shallow", 42, 674_871), ("nature", 84, 1_687_719), ("resnet", 84, 1_091_031)],
)
def test_networks_have_the_published_sizes(network, frame, count):
    """By hand, for six actions: shallow at 84 is 8*8*4*16+16 + 4*4*16*32+32 + 2592*256+256 + 257*6 + 257."""
    obs = np.zeros((2, 4, frame, frame), np.uint8)
    net = ActorCritic(network, 6)
    params = jax.eval_shape(net.init, jax.random.key(0), obs)
    assert sum(np.prod(x.shape) for x in jax.tree.leaves(params)) == count
    logits, value = jax.eval_shape(net.apply, params, obs)
    assert logits.shape == (2, 6) and value.shape == (2,)


# --- acting: a scripted game against what the rows must say -----------------------------------------------------------


class Scripted:
    """Two environments that play a list of (reward, lost a life, time limit, game over); resets on the next step."""

    script = [
        [(0, 0, 0, 0), (5, 0, 0, 0), (0, 1, 0, 0), (3, 0, 0, 0), (-2, 1, 0, 1), (1, 0, 0, 0), (1, 0, 0, 0)],
        [(1, 0, 0, 0), (1, 0, 0, 0), (1, 0, 0, 0), (1, 0, 1, 0), (4, 0, 0, 0), (0, 0, 1, 1), (2, 0, 0, 0)],
    ]

    def __init__(self):
        self.cursor, self.frame, self.ended = [0, 0], 0, [False, False]

    def frames(self):
        self.frame += 1
        return np.full((2, 1, 2, 3), self.frame, np.uint8)

    def reset(self):
        return self.frames(), {}

    def step(self, action):
        rows = []
        for i in (0, 1):
            if self.ended[i]:
                rows.append((0, 0, 0, 0))
            else:
                rows.append(self.script[i][self.cursor[i] % len(self.script[i])])
                self.cursor[i] += 1
            self.ended[i] = any(rows[-1][1:])
        reward, life, limit, over = (np.array(column) for column in zip(*rows))
        # Like EnvPool: a game that ends on its last allowed step says truncated, and info says that it is over.
        terminated, truncated = ((life + over) > 0) & (limit == 0), limit > 0
        info = {"reward": reward.astype(np.float32), "terminated": over.astype(np.int32)}
        return self.frames(), np.sign(reward).astype(np.float32), terminated, truncated, info


def test_actor_writes_the_rows_that_the_environments_played(monkeypatch):
    monkeypatch.setattr(script, "make_env", lambda *_, **__: Scripted())
    params = tiny_params(np.random.default_rng(0))
    worker = script.Worker(Args(num_envs=2, num_steps=4, gamma=0.9), tiny_apply, (0,), jax.random.key(0))
    rollouts = [worker.rollout(params) for _ in range(3)]
    rows = {f: np.concatenate([getattr(r[0], f) for r in rollouts], axis=1) for f in "reward discount cut mask".split()}
    # Environment 0: life lost at row 2, dummy 3, game over at 5, dummy 6, life lost at 11. Environment 1: limit at 3,
    # dummy 4 (a rollout's edge lies between), game over on the limit at 6, dummy 7.
    np.testing.assert_array_equal(rows["reward"][0], [0, 1, 0, 0, 1, -1, 0, 1, 1, 0, 1, 0])
    np.testing.assert_array_equal(rows["reward"][1], [1, 1, 1, 1, 0, 1, 0, 0, 1, 1, 1, 1])
    np.testing.assert_array_equal(np.flatnonzero(~rows["mask"][0]), [3, 6])
    np.testing.assert_array_equal(np.flatnonzero(~rows["mask"][1]), [4, 7])
    np.testing.assert_array_equal(np.flatnonzero(rows["cut"][0]), [2, 5, 11])
    np.testing.assert_array_equal(np.flatnonzero(rows["cut"][1]), [3, 6])
    np.testing.assert_array_equal(np.flatnonzero(rows["discount"][0] == 0), [2, 5, 11])  # lives, a game over
    np.testing.assert_array_equal(np.flatnonzero(rows["discount"][1] == 0), [6])  # not the limit; but dead on the limit
    assert set(np.unique(rows["discount"])) == {np.float32(0), np.float32(0.9)}
    games = [(r[1]["charts/episodic_return"], r[1]["charts/episodic_length"]) for r in rollouts]
    assert games == [([4.0], [4]), ([6.0, 4.0], [5, 2]), ([], [])]  # unclipped, over lives, dummy rows not counted
    obs = rollouts[1][0].obs
    np.testing.assert_array_equal(obs[0, :, 0, 0, 0], [5, 6, 7, 8, 9])  # T+1, the first is the last of the one before
    logits, _ = tiny_apply(params, obs[0, :4])
    expected = script.log_prob(logits, jnp.array(rollouts[1][0].action[0]))
    np.testing.assert_allclose(rollouts[1][0].logp[0], expected, **CLOSE)


def test_evaluation_counts_the_first_whole_game_of_each_environment_unclipped():
    params = tiny_params(np.random.default_rng(0))
    act = lambda obs, i: np.array(script.policy_step(tiny_apply, params, obs, jax.random.key(0), i)[0])  # noqa: E731
    returns = script.play(2, Scripted(), script.step_env, act)
    assert sorted(returns) == [4.0, 6.0]
