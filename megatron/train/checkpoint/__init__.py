"""Checkpoints: everything that training changes, in a directory per iteration, loaded by any layout.

files (names, durable writes), record (the readable half), plan, shard, save, retention, verify, load, and ranks
(agreement). docs/concepts/checkpoints.md tells it to users.

Note "Any layout". Weights and optimizer state carry global names and offsets (megatron/fsdp/checkpoint.py) and load
under any number of ranks and strategy. Random states belong to a rank's place in a layout and are restored in the same
one.
"""

from megatron.train.checkpoint.files import (
    CHECKSUM_FILE,
    MARKER,
    METADATA_FILE,
    RUN_FILE,
    directory_of,
    existing_directory,
    iterations_in,
    latest_iteration,
)
from megatron.train.checkpoint.load import DamagedCheckpointError, LoadOptions, load_tensors, read_shapes
from megatron.train.checkpoint.ranks import Ranks
from megatron.train.checkpoint.reader import CheckpointReader
from megatron.train.checkpoint.record import (
    FREE_MODEL_FIELDS,
    Progress,
    RunRecord,
    check_same_model,
    read_record,
    read_record_of,
)
from megatron.train.checkpoint.retention import Retention
from megatron.train.checkpoint.save import Saver, Target, save_checkpoint
from megatron.train.checkpoint.verify import (
    ChoiceOptions,
    Found,
    choose_checkpoint,
    faults,
    find_checkpoint,
)

__all__ = [
    "CHECKSUM_FILE",
    "FREE_MODEL_FIELDS",
    "MARKER",
    "METADATA_FILE",
    "RUN_FILE",
    "CheckpointReader",
    "ChoiceOptions",
    "DamagedCheckpointError",
    "Found",
    "LoadOptions",
    "Progress",
    "Ranks",
    "Retention",
    "RunRecord",
    "Saver",
    "Target",
    "check_same_model",
    "choose_checkpoint",
    "directory_of",
    "existing_directory",
    "faults",
    "find_checkpoint",
    "iterations_in",
    "latest_iteration",
    "load_tensors",
    "read_record",
    "read_record_of",
    "read_shapes",
    "save_checkpoint",
]
