"""IMPALA: V-trace against a slow loop, hand-computed cases and rlax; the loss, the masks, RMSProp."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from micro_envs import MatchTheBit, install
from traces import CLOSE, GAMMA, dirty, log_softmax, random_columns, random_trace, slow_v_gae, tiny_apply, tiny_params

import impala_atari as script
from impala_atari import Args, Rollout, TrainState, impala_loss, v_trace


def slow_v_trace(value, reward, discount, cut, log_w, rho_bar, c_bar):
    """Equation 1 of the paper, as a double loop: v_s = V(x_s) + sum_k (discounts and c's between) delta_k."""
    w, T = np.exp(log_w), len(reward)
    delta = [min(rho_bar, w[t]) * (reward[t] + discount[t] * value[t + 1] - value[t]) for t in range(T)]
    v = []
    for s in range(T):
        total, weight = value[s], 1.0
        for t in range(s, T):
            total += weight * delta[t]
            if cut[t]:
                break
            weight *= discount[t] * min(c_bar, w[t])
        v.append(total)
    advantage = []
    for t in range(T):
        v_next = value[t + 1] if t == T - 1 or cut[t] else v[t + 1]
        advantage.append(min(rho_bar, w[t]) * (reward[t] + discount[t] * v_next - value[t]))
    return np.array(v), np.array(advantage)


def tiny_state(params, tx=None):
    tx = tx or optax.sgd(0.1)
    return jax.device_put(jax.tree.map(np.array, TrainState.create(apply_fn=tiny_apply, params=params, tx=tx)))


@pytest.mark.parametrize("rho_bar, c_bar", [(1.0, 1.0), (2.0, 1.0), (0.5, 0.7)])
def test_v_trace_equals_the_slow_loop(rho_bar, c_bar):
    rng = np.random.default_rng(0)
    for _ in range(50):
        trace = random_trace(rng)
        for fast, slow in zip(v_trace(*trace, rho_bar, c_bar), slow_v_trace(*trace, rho_bar, c_bar)):
            np.testing.assert_allclose(fast, slow, **CLOSE)


@pytest.mark.parametrize("rho_bar", [1.0, 2.0])
def test_v_trace_equals_rlax(rho_bar):
    """rlax knows no truncations and no other c_bar than 1; the traces have terminations only, some on the edge."""
    rlax = pytest.importorskip("rlax")
    rng = np.random.default_rng(1)
    for _ in range(10):
        value, reward, discount, _, log_w = random_trace(rng)
        target, advantage = v_trace(value, reward, discount, discount == 0, log_w, rho_bar, c_bar=1.0)
        theirs = rlax.vtrace_td_error_and_advantage(
            jnp.array(value[:-1]), jnp.array(value[1:]), jnp.array(reward), jnp.array(discount), jnp.exp(log_w),
            clip_rho_threshold=rho_bar, clip_pg_rho_threshold=rho_bar,
        )  # fmt: skip
        np.testing.assert_allclose(target - value[:-1], theirs.errors, **CLOSE)
        np.testing.assert_allclose(advantage, theirs.pg_advantage, **CLOSE)


def test_v_trace_by_hand():
    """Rows: a step, a truncation, its dummy row, a termination on the rollout's edge. Discount 1/2; w = 1, 2, 1, .5."""
    value, reward = np.array([1.0, 2.0, 4.0, 8.0, np.nan]), np.array([1.0, 1.0, 99.0, 3.0])
    discount, cut = np.array([0.5, 0.5, 0.5, 0.0]), np.array([False, True, False, True])
    target, advantage = v_trace(value, reward, discount, cut, np.log([1.0, 2.0, 1.0, 0.5]), 1.0, 1.0)
    # t=3: delta = (3 - 8) / 2, so v = 5.5.  t=1: delta = 1 + 4/2 - 2 = 1, v = 3; bootstraps from the true last frame.
    # t=0: delta = 1 + 2/2 - 1 = 1, v = 1 + 1 + (3 - 2) / 2 = 2.5, advantage = 1 + 3/2 - 1 = 1.5.
    np.testing.assert_allclose(np.array(target)[[0, 1, 3]], [2.5, 3.0, 5.5])
    np.testing.assert_allclose(np.array(advantage)[[0, 1, 3]], [1.5, 1.0, -2.5])


def test_every_reward_of_a_rollout_counts():
    """Also the last one: raising any single reward raises the value target of its own row by exactly as much."""
    value, discount, cut, T = np.zeros(9), np.full(8, GAMMA), np.zeros(8, bool), 8
    for t in range(T):
        target, advantage = v_trace(value, np.eye(T)[t], discount, cut, np.zeros(T), 1.0, 1.0)
        np.testing.assert_allclose(target, [GAMMA ** (t - s) if s <= t else 0 for s in range(T)], rtol=1e-5)
        np.testing.assert_allclose(advantage, target, rtol=1e-5)


def test_on_policy_the_targets_are_the_n_step_returns_of_v_gae():
    rng = np.random.default_rng(2)
    value, reward, discount, cut, _ = random_trace(rng)
    target, _ = v_trace(value, reward, discount, cut, np.zeros(12), 1.0, 1.0)
    np.testing.assert_allclose(target, slow_v_gae(value, reward, discount, cut, np.zeros(12), 1.0)[1], **CLOSE)


def test_loss_and_gradient_equal_numpy_and_a_plain_sum():
    """Loss in numpy; gradient from an independent formulation, in which the targets are constants."""
    rng = np.random.default_rng(3)
    live, worker = tiny_params(rng), tiny_params(rng)
    columns = random_columns(rng, worker)
    args = Args(num_minibatches=1)
    grad_fn = jax.value_and_grad(impala_loss, has_aux=True)
    (loss, metrics), grads = grad_fn(live, tiny_state(live), Rollout(**columns), args)

    B, T = columns["mask"].shape
    x = columns["obs"].reshape(B, T + 1, 6) / 255.0
    log_pi, value = log_softmax(x @ np.array(live["policy"])), x @ np.array(live["value"])
    rows, expected, entropies = [], 0.0, []
    for b in range(B):
        logp = log_pi[b, np.arange(T), columns["action"][b]]
        trace = (value[b], *(columns[name][b] for name in ("reward", "discount", "cut")), logp - columns["logp"][b])
        for t, (goal, advantage) in enumerate(zip(*slow_v_trace(*trace, 1.0, 1.0))):
            if columns["mask"][b, t]:
                entropies.append(-(np.exp(log_pi[b, t]) * log_pi[b, t]).sum())
                expected += -advantage * logp[t] + 0.5 * (goal - value[b, t]) ** 2 / 2 - 0.01 * entropies[-1]
                rows.append((x[b, t], columns["action"][b, t], goal, advantage))
    np.testing.assert_allclose(loss, expected, rtol=2e-5)  # a sum over the batch, not a mean
    np.testing.assert_allclose(metrics["losses/entropy"], np.mean(entropies), rtol=2e-5)
    xs, actions, goals, advantages = (np.stack(column) for column in zip(*rows))

    def plain(p):
        log_probs = jax.nn.log_softmax(xs @ p["policy"])
        policy = -(advantages * (log_probs * jax.nn.one_hot(actions, 4)).sum(1)).sum()
        critic = 0.25 * ((xs @ p["value"] - goals) ** 2).sum()
        return policy + critic + 0.01 * (jnp.exp(log_probs) * log_probs).sum()

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), grads, jax.grad(plain)(live))


def test_masked_rows_have_no_influence():
    """NaN in their rewards and log-probs, other actions and frames: not a bit of loss and gradient may change."""
    rng = np.random.default_rng(4)
    live, worker = tiny_params(rng), tiny_params(rng)
    clean = random_columns(rng, worker, B=8, T=20)
    clean["discount"] = np.where(clean["cut"], 0.0, clean["discount"])  # terminations: no row needs the dummy's frame
    results = []
    for columns in (clean, dirty(rng, clean)):
        grad_fn = jax.value_and_grad(impala_loss, has_aux=True)
        results.append(grad_fn(live, tiny_state(live), Rollout(**columns), Args()))
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_a_truncation_bootstraps_from_the_dummy_rows_frame_but_a_termination_does_not():
    rng = np.random.default_rng(5)
    params = tiny_params(rng)
    rollout = Rollout(**random_columns(rng, params, B=1, T=3, end_probability=0.0))
    rollout.cut[0, 0], rollout.mask[0, 1], rollout.mask[0, 2] = True, False, False
    changed = replace(rollout, obs=rollout.obs.copy())
    changed.obs[0, 1] = 255 - changed.obs[0, 1]
    first = lambda r: float(impala_loss(params, tiny_state(params), r, Args())[0])  # noqa: E731
    assert abs(first(rollout) - first(changed)) > 1e-3
    end = dict(discount=np.where(rollout.cut, 0, rollout.discount).astype(np.float32))
    np.testing.assert_allclose(first(replace(rollout, **end)), first(replace(changed, **end)), rtol=1e-6)


def test_rmsprop_is_the_papers(monkeypatch, tmp_path):
    """Two SGD steps of `main`, recomputed: clip at 40, decay .99, epsilon .01 inside the root, no momentum."""
    install(monkeypatch, script, MatchTheBit)
    sgd_step, seen = script.sgd_step, []

    def spy(state, batch, loss_fn, args):
        batch = batch.replace(reward=500.0 * batch.reward)  # so that the clip acts
        before = jax.tree.map(np.array, state.params)
        grads = jax.tree.map(np.array, jax.grad(loss_fn, has_aux=True)(state.params, state, batch, args)[0])
        state, metrics = sgd_step(state, batch, loss_fn, args)
        seen.append((before, grads, jax.tree.map(np.array, state.params)))
        return state, metrics

    monkeypatch.setattr(script, "sgd_step", spy)
    script.main(Args(frame_size=42, num_envs=2, num_steps=4, total_timesteps=16, eval_episodes=0, save_model=False,
                     runs_dir=str(tmp_path)))  # fmt: skip
    mean_square = jax.tree.map(np.zeros_like, seen[0][0])
    for i, (before, grads, after) in enumerate(seen):
        norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in jax.tree.leaves(grads)))
        assert norm > 100
        grads = jax.tree.map(lambda g, norm=norm: g * min(1.0, 40 / norm), grads)
        mean_square = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g**2, mean_square, grads)
        rate = 6e-4 * (1 - i / 2)
        moved = jax.tree.map(lambda p, g, m, r=rate: p - r * g / np.sqrt(m + 0.01), before, grads, mean_square)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), moved, after)
    assert len(seen) == 2


def test_minibatches_are_shares_of_the_environments(monkeypatch, tmp_path):
    """Each rollout is split by environments, whole in time; together the shares are the rollout."""
    install(monkeypatch, script, MatchTheBit)
    sgd_step, rollouts, shares = script.sgd_step, [], []
    rollout = script.Worker.rollout

    def spy_rollout(worker, params):
        rollouts.append(rollout(worker, params))
        return rollouts[-1]

    def spy_step(state, batch, loss_fn, args):
        shares.append(jax.tree.map(np.array, batch))
        return sgd_step(state, batch, loss_fn, args)

    monkeypatch.setattr(script.Worker, "rollout", spy_rollout)
    monkeypatch.setattr(script, "sgd_step", spy_step)
    script.main(Args(frame_size=42, num_envs=6, num_steps=4, num_minibatches=3, total_timesteps=48, eval_episodes=0,
                     concurrency=False, queue_size=0, runs_dir=str(tmp_path)))  # fmt: skip
    assert len(rollouts) == 2 and len(shares) == 6
    for i, share in enumerate(shares):
        whole = rollouts[i // 3][0]
        jax.tree.map(lambda a, b, j=i % 3: np.testing.assert_array_equal(a, b[[j, j + 3]]), share, whole)
