"""The types of data: conversations, inputs and outputs of models, samples. Plain dicts and dataclasses.

Datasets, models, samplers and services exchange plain dicts, so that rows of any origin pass through unchanged. The
``TypedDict`` types name the keys that Twinkle itself reads; other keys are always allowed.
"""

from twinkle.data_format.input_feature import InputFeature
from twinkle.data_format.message import Message, Tool, ToolCall
from twinkle.data_format.output import LossOutput, ModelOutput
from twinkle.data_format.sampling import SampledSequence, SampleResponse, SamplingParams
from twinkle.data_format.trajectory import Trajectory, pack_value, user_data_get

__all__ = [
    "InputFeature",
    "LossOutput",
    "Message",
    "ModelOutput",
    "SampleResponse",
    "SampledSequence",
    "SamplingParams",
    "Tool",
    "ToolCall",
    "Trajectory",
    "pack_value",
    "user_data_get",
]
