"""The facts about EnvPool and JAX that the scripts rely on: an upgrade that changes one must fail here, loudly."""

import envpool
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from impact_atari import Args, make_env, step_env


def play(env, steps, policy, seed=0):
    """Steps as [(action, obs, reward, terminated, truncated, game over, unclipped reward, info), ...]."""
    rng, obs = np.random.default_rng(seed), env.reset()[0]
    rows = [(None, obs, None, None, None, None, None)]
    for _ in range(steps):
        action = policy(rng).astype(np.int32)
        rows.append((action, *step_env(env, action)))
    return rows


def test_reset_happens_on_the_next_step_which_ignores_its_action():
    """Two environments with one seed and other actions on the dummy rows stay equal; the dummy row pays nothing."""
    args = Args(env_id="Breakout-v5")
    runs = []
    for variant in (0, 1):
        env, rng, ended, frames, dummies = make_env(args, 8, (3,)), np.random.default_rng(0), np.zeros(8, bool), [], 0
        env.reset()
        for _ in range(400):
            action = rng.integers(0, 4, 8).astype(np.int32)
            action[ended] = (action[ended] + variant) % 4
            obs, reward, terminated, truncated, _, raw = step_env(env, action)
            assert (reward[ended] == 0).all() and (raw[ended] == 0).all()
            assert not (terminated | truncated)[ended].any()  # never two ends in a row
            dummies += ended.sum()
            ended = terminated | truncated
            frames.append(obs[:, -1, ::4, ::4].copy())
        assert dummies > 20
        runs.append(np.array(frames))
    np.testing.assert_array_equal(runs[0], runs[1])


def test_a_lost_life_terminates_but_is_not_the_end_of_the_game():
    rows = play(make_env(Args(env_id="Breakout-v5"), 8, (1,)), 800, lambda rng: rng.integers(0, 4, 8))[1:]
    ends, games = sum(row[3].sum() for row in rows), sum(row[5].sum() for row in rows)
    assert games >= 5 and 4 * games <= ends <= 5 * games + 5 * 8  # five lives
    whole_games = make_env(Args(env_id="Breakout-v5", episodic_life=False), 8, (1,))
    rows = play(whole_games, 800, lambda rng: rng.integers(0, 4, 8))
    assert sum(row[3].sum() for row in rows[1:]) == sum(row[5].sum() for row in rows[1:]) >= 5


def test_time_limit_is_a_truncation_with_the_true_last_observation():
    rows = play(make_env(Args(max_episode_steps=20), 2, (1,)), 43, lambda rng: np.zeros(2))
    for t, row in enumerate(rows[1:], 1):
        assert row[4].all() == (t % 21 == 20) and not row[3].any()  # 20 steps, then a dummy
        assert row[5].all() == row[4].all()
    last, first = rows[20][1], rows[21][1]
    np.testing.assert_array_equal(last[:, :3], rows[19][1][:, 1:])  # the stack goes on to the last frame,
    assert (first[:, 3] != last[:, 3]).any()  # and the dummy row's step returns a new game


def test_observations_are_uint8_oldest_first_and_never_written_again():
    rows = play(make_env(Args(), 2, (1,)), 60, lambda rng: rng.integers(0, 6, 2))
    assert rows[0][1].shape == (2, 4, 84, 84) and rows[0][1].dtype == np.uint8
    np.testing.assert_array_equal(rows[30][1][:, 1:], rows[31][1][:, :3])
    copies = [row[1].copy() for row in rows]
    for row, copy in zip(rows, copies):
        np.testing.assert_array_equal(row[1], copy)
    assert make_env(Args(frame_size=42), 1, (1,)).reset()[0].shape == (1, 4, 42, 42)


def test_rewards_are_clipped_for_learning_and_returned_unclipped():
    rows = play(make_env(Args(env_id="SpaceInvaders-v5"), 8, (1,)), 300, lambda rng: rng.integers(0, 6, 8))[1:]
    clipped, raw = np.array([row[2] for row in rows]), np.array([row[6] for row in rows])
    assert raw.max() > 1 and clipped.max() == 1
    np.testing.assert_array_equal(clipped, np.sign(raw))


def test_seeds_give_reproducible_and_unrelated_environments():
    def frames(entropy):
        return np.array([row[1] for row in play(make_env(Args(), 3, entropy), 60, lambda rng: rng.integers(0, 6, 3))])

    one, again, neighbour = frames((1,)), frames((1,)), frames((2,))
    np.testing.assert_array_equal(one, again)
    for i in range(3):
        for j in range(3):
            assert (one[:, i] != neighbour[:, j]).any()
            assert i == j or (one[:, i] != one[:, j]).any()


def test_pong_is_in_the_list_and_unknown_names_are_not():
    assert "Pong-v5" in envpool.list_all_envs() and "Nope-v5" not in envpool.list_all_envs()


def test_donation_deletes_and_jnp_copy_does_not_share():
    """Why the actors get copies, and why the target network is one."""

    @jax.jit
    def both(x):
        return x, jnp.copy(x)

    a, b = both(jnp.arange(8.0))
    assert a.unsafe_buffer_pointer() != b.unsafe_buffer_pointer()
    donating = jax.jit(lambda x: x + 1, donate_argnums=0)
    donating(a)
    with pytest.raises((RuntimeError, ValueError)):
        np.asarray(a)
    np.testing.assert_array_equal(b, np.arange(8.0))
