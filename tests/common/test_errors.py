import pytest

from mlsm.common.errors import MOST_CHARACTERS, RecordError

pytestmark = pytest.mark.promise("checkpoints behind …")


def test_a_very_long_message_keeps_its_beginning_and_its_end():
    message = str(RecordError(f"rte.json: field task: found {'x' * 70_000!r}. Evaluate again."))
    assert message.startswith("rte.json: field task: found 'xxx") and message.endswith("xxx'. Evaluate again.")
    assert len(message) < MOST_CHARACTERS + 10
    assert str(RecordError("short.")) == "short."
