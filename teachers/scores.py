"""Mean returns per game of a random policy and of a human, which normalise an agent's score.

Both columns as in Dopamine's labs/atari_100k/normalization_utils.py; the human scores are those of 30-minute games, as
in the tables of C51 and DQN Zoo. The first ten are the games of the QDagger paper.
"""

from typing import NamedTuple

from .errors import TeacherError


class Scores(NamedTuple):
    random: float  # unclipped return of a game
    human: float


SCORES = {
    "Asterix": Scores(210.0, 8503.3),
    "Breakout": Scores(1.7, 30.5),
    "SpaceInvaders": Scores(148.0, 1668.7),
    "Seaquest": Scores(68.4, 42054.7),
    "Qbert": Scores(163.9, 13455.0),
    "BeamRider": Scores(363.9, 16926.5),
    "Enduro": Scores(0.0, 860.5),
    "MsPacman": Scores(307.3, 6951.6),
    "Bowling": Scores(23.1, 160.7),
    "Riverraid": Scores(1338.5, 17118.0),
    "Pong": Scores(-20.7, 14.6),
}


def scores_of(env_id: str) -> Scores:
    """The scores of a game by EnvPool's name ("Pong-v5")."""
    game = env_id.partition("-")[0]
    if game not in SCORES:
        raise TeacherError(f"{env_id}: no random and human score; add them to {__file__}, or take {', '.join(SCORES)}")
    return SCORES[game]
