"""PPO: GAE against a slow loop and rlax, one update against numpy and optax, and IMPACT without lag."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from micro_envs import MatchTheBit, install
from traces import CLOSE, dirty, log_softmax, random_columns, random_trace, slow_v_gae, tiny_apply, tiny_params

import impact_atari
import ppo_atari as script
from ppo_atari import Args, EvaluatedRollout, Rollout, TrainState, gae, ppo_loss


def tiny_state(params, tx=None):
    tx = tx or optax.sgd(0.1)
    return jax.device_put(jax.tree.map(np.array, TrainState.create(apply_fn=tiny_apply, params=params, tx=tx)))


@pytest.mark.parametrize("lambda_", [0.0, 0.8, 1.0])
def test_gae_equals_the_slow_loop(lambda_):
    rng = np.random.default_rng(0)
    for _ in range(50):
        value, reward, discount, cut, _ = random_trace(rng)
        slow, _ = slow_v_gae(value, reward, discount, cut, np.zeros(12), lambda_)
        np.testing.assert_allclose(gae(value, reward, discount, cut, lambda_), slow, **CLOSE)


@pytest.mark.parametrize("lambda_", [0.0, 0.8, 1.0])
def test_gae_equals_rlax(lambda_):
    rlax = pytest.importorskip("rlax")
    rng = np.random.default_rng(0)
    for _ in range(10):
        value, reward, discount, _, _ = random_trace(rng)
        theirs = rlax.truncated_generalized_advantage_estimation(*map(jnp.array, (reward, discount)), lambda_, value)
        np.testing.assert_allclose(gae(value, reward, discount, discount == 0, lambda_), theirs, **CLOSE)


def test_gae_by_hand():
    """Rows: a step, a truncation, its dummy row, a termination on the rollout's edge. lambda = 1/2."""
    value, reward = np.array([1.0, 2.0, 4.0, 8.0, np.nan]), np.array([1.0, 1.0, 99.0, 3.0])
    discount, cut = np.array([0.5, 0.5, 0.5, 0.0]), np.array([False, True, False, True])
    # t=3: 3 - 8 = -5.  t=1: 1 + 4/2 - 2 = 1, bootstraps from the true last observation.  t=0: 1 + 2/2 - 1 + 1/4 = 1.25.
    np.testing.assert_allclose(np.array(gae(value, reward, discount, cut, 0.5))[[0, 1, 3]], [1.25, 1.0, -5.0])


@pytest.mark.parametrize("clip_vloss", [False, True])
def test_one_update_equals_numpy_and_optax(clip_vloss):
    """One minibatch: advantages, loss and the new parameters, gradients by finite differences of the numpy loss."""
    rng = np.random.default_rng(1)
    args = Args(clip_vloss=clip_vloss)
    old = tiny_params(rng)
    live = jax.tree.map(lambda x: x + 0.3 * jnp.array(rng.normal(size=x.shape), jnp.float32), old)
    columns = random_columns(rng, old)
    batch = script.with_advantages(tiny_state(old), Rollout(**columns), args)  # the critic of when the batch came

    B, T = columns["mask"].shape
    x = columns["obs"].reshape(B, T + 1, 6) / 255.0
    old_value = x @ np.array(old["value"], np.float64)
    advantage = np.stack([
        slow_v_gae(old_value[b], *(columns[n][b] for n in ("reward", "discount", "cut")), np.zeros(T), 0.95)[0]
        for b in range(B)
    ])  # fmt: skip
    keep = columns["mask"]
    goal, old_v = (advantage + old_value[:, :-1])[keep], old_value[:, :-1][keep]
    a = advantage[keep]
    a = (a - a.mean()) / np.sqrt(a.var() + 1e-8)
    frames, actions, logp = x[:, :-1][keep], columns["action"][keep], columns["logp"][keep]

    def loss_of(params):
        log_pi = log_softmax(frames @ params["policy"])
        ratio = np.exp(log_pi[np.arange(len(a)), actions] - logp)
        v = frames @ params["value"]
        error = (v - goal) ** 2
        if clip_vloss:
            error = np.maximum(error, (old_v + np.clip(v - old_v, -0.1, 0.1) - goal) ** 2)
        entropy = -(np.exp(log_pi) * log_pi).sum(1)
        clipped = np.clip(ratio, 0.9, 1.1)
        return np.maximum(-a * ratio, -a * clipped).mean() + 0.5 * error.mean() / 2 - 0.01 * entropy.mean()

    exact = jax.tree.map(lambda p: np.array(p, np.float64), live)
    grads = jax.tree.map(np.zeros_like, exact)
    for name, p in exact.items():
        for i in np.ndindex(p.shape):
            nudge = {k: v.copy() for k, v in exact.items()}
            nudge[name][i] += 1e-6
            up = loss_of(nudge)
            nudge[name][i] -= 2e-6
            grads[name][i] = (up - loss_of(nudge)) / 2e-6
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(2.5e-4, eps=1e-5))
    loss, _ = ppo_loss(live, tiny_state(live), batch, args)
    np.testing.assert_allclose(loss, loss_of(exact), rtol=2e-5)
    grads = jax.tree.map(lambda g: jnp.array(g, jnp.float32), grads)
    updates, _ = tx.update(grads, tx.init(live), live)
    expected = optax.apply_updates(live, updates)
    state, metrics = script.sgd_step(tiny_state(live, tx), batch, ppo_loss, args)
    jax.tree.map(lambda p, q: np.testing.assert_allclose(p, q, rtol=1e-5, atol=2e-6), state.params, expected)
    np.testing.assert_allclose(metrics["losses/grad_norm"], optax.tree.norm(grads), rtol=1e-3)


@pytest.mark.parametrize("norm_adv", [False, True])
def test_impact_without_lag_has_ppos_loss_and_gradient(norm_adv):
    """Worker = target: on one rollout, at any live parameters, the two scripts compute the same."""
    rng = np.random.default_rng(2)
    old = tiny_params(rng)
    shared = dict(norm_adv=norm_adv, gae_lambda=0.95, clip_coef=0.2, vf_coef=0.5)
    columns = random_columns(rng, old)
    ppo_args, impact_args = Args(**shared), impact_atari.Args(**shared)
    impact_state = impact_atari.TrainState.create(
        apply_fn=tiny_apply, params=old, tx=optax.sgd(0.1), target_params=old, kl_coef=jnp.float32(0)
    )
    impact_batch = impact_atari.evaluate_batch(impact_state, impact_atari.Rollout(**columns), impact_args)
    ppo_batch = script.with_advantages(tiny_state(old), Rollout(**columns), ppo_args)
    for step in (0.0, 0.3):  # where the ratio is 1, and where the clip acts
        live = jax.tree.map(lambda x: x + step * jnp.array(rng.normal(size=x.shape), jnp.float32), old)  # noqa: B023
        grad_fn = jax.value_and_grad(ppo_loss, has_aux=True)
        (ppo, ppo_metrics), ppo_grad = grad_fn(live, tiny_state(live), ppo_batch, ppo_args)
        grad_fn = jax.value_and_grad(impact_atari.impact_loss, has_aux=True)
        (impact, metrics), impact_grad = grad_fn(live, impact_state, impact_batch, impact_args)
        np.testing.assert_allclose(impact, ppo, **CLOSE)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), impact_grad, ppo_grad)
        for name in ppo_metrics:
            np.testing.assert_allclose(metrics[name], ppo_metrics[name], rtol=1e-4, atol=1e-5, err_msg=name)
    assert ppo_metrics["losses/clipfrac"] > 0.1


def test_masked_rows_have_no_influence():
    """NaN in their rewards and log-probs, other actions and frames: not a bit of loss and gradient may change."""
    rng = np.random.default_rng(3)
    live, old = tiny_params(rng), tiny_params(rng)
    clean = random_columns(rng, old, B=8, T=20)
    clean["discount"] = np.where(clean["cut"], 0.0, clean["discount"])  # terminations: no row needs the dummy's frame
    args, results = Args(clip_vloss=True), []
    for columns in (clean, dirty(rng, clean)):
        batch = script.with_advantages(tiny_state(old), Rollout(**columns), args)
        results.append(jax.value_and_grad(ppo_loss, has_aux=True)(live, tiny_state(live), batch, args))
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_value_clipping_takes_the_larger_error():
    """Every value goes to 0, its goal is old value + 1: the loss takes the larger error."""
    rng = np.random.default_rng(4)
    params = tiny_params(rng)
    columns = random_columns(rng, params, end_probability=0.0)
    batch = script.with_advantages(tiny_state(params), Rollout(**columns), Args())
    batch = replace(batch, value_target=batch.value + 1.0)
    nearer = params | {"value": params["value"] * 0.0}
    value = columns["obs"][:, :-1].reshape(-1, 6) / 255.0 @ np.array(params["value"])
    clipped = np.maximum((0 - value - 1) ** 2, (np.clip(-value, -0.1, 0.1) - 1) ** 2).mean() / 2
    _, metrics = ppo_loss(nearer, tiny_state(params), batch, Args(clip_vloss=True))
    np.testing.assert_allclose(metrics["losses/value_loss"], clipped, rtol=1e-5)
    _, metrics = ppo_loss(nearer, tiny_state(params), batch, Args())
    np.testing.assert_allclose(metrics["losses/value_loss"], ((value + 1) ** 2).mean() / 2, rtol=1e-5)


def test_main_is_synchronous_and_visits_every_row_once_an_epoch(monkeypatch, tmp_path):
    """Each rollout is played by the newest parameters, and every epoch is a partition of its rows."""
    install(monkeypatch, script, MatchTheBit)
    learn, rollout, log = script.learn, script.Worker.rollout, []

    def spy_rollout(worker, params):
        log.append(("played by", np.array(jax.tree.leaves(params)[0])))
        return rollout(worker, params)

    def spy_learn(state, batch: EvaluatedRollout, rows, loss_fn, args):
        assert rows.shape == (3 * 2, 4, 4)
        for epoch in rows.reshape(3, 2, 4, 4):
            np.testing.assert_array_equal(np.sort(epoch.swapaxes(0, 1).reshape(4, 8)), np.tile(np.arange(8), (4, 1)))
        state, metrics = learn(state, batch, rows, loss_fn, args)
        log.append(("learned", np.array(jax.tree.leaves(state.params)[0])))
        np.testing.assert_allclose(metrics["losses/ratio"][0], 1.0, rtol=1e-5)  # on-policy before the first SGD step
        assert abs(metrics["losses/approx_kl"][0]) < 1e-6
        return state, metrics

    monkeypatch.setattr(script.Worker, "rollout", spy_rollout)
    monkeypatch.setattr(script, "learn", spy_learn)
    script.main(Args(frame_size=42, num_envs=4, num_steps=8, num_minibatches=2, update_epochs=3, total_timesteps=96,
                     eval_episodes=0, network="shallow", learning_rate=0.01, runs_dir=str(tmp_path)))  # fmt: skip
    assert [kind for kind, _ in log] == ["played by", "learned"] * 3
    for (_, learned), (_, played) in zip(log[1::2], log[2::2]):
        np.testing.assert_array_equal(learned, played)
    assert (log[1][1] != log[3][1]).any()
