"""What scores completions: functions, models, objects, services, called alike and checked alike."""

from rloom.rewards.base import Reward, RewardBatch
from rloom.rewards.code import code_execution
from rloom.rewards.collection import RewardSet
from rloom.rewards.functions import FunctionReward, ObjectReward
from rloom.rewards.model import ModelReward

__all__ = ["FunctionReward", "ModelReward", "ObjectReward", "Reward", "RewardBatch", "RewardSet", "code_execution"]
