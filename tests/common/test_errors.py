import pickle

import pytest

from mlsm.common import errors
from mlsm.common.errors import MOST_CHARACTERS, RecordError

pytestmark = pytest.mark.promise("checkpoints behind …")


def test_a_very_long_message_keeps_its_beginning_and_its_end():
    message = str(RecordError(f"rte.json: field task: found {'x' * 70_000!r}. Evaluate again."))
    assert message.startswith("rte.json: field task: found 'xxx") and message.endswith("xxx'. Evaluate again.")
    assert len(message) < MOST_CHARACTERS + 10
    assert str(RecordError("short.")) == "short."


ARGUMENTS = {
    "BlockError": ("a.tar: damaged", "block-3", 512, 64),
    "NotUtf8Error": ("a.txt: byte 3", "Convert it"),
    "Interrupted": ("SIGTERM: a checkpoint was saved", 15),
}


@pytest.mark.parametrize(
    "kind", [kind for kind in vars(errors).values() if isinstance(kind, type)], ids=lambda kind: kind.__name__
)
def test_a_process_pool_can_pass_on_every_error(kind):
    error = kind(*ARGUMENTS.get(kind.__name__, ("a message",)))
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind and str(copy) == str(error) and vars(copy) == vars(error)
