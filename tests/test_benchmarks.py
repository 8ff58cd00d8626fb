"""What the benchmarks share; the scripts themselves are tested with what they measure."""

from __future__ import annotations

import json

from benchmarks import common


def test_records_of_an_earlier_run_keep_their_machine(tmp_path):
    path = tmp_path / "records.json"
    earlier = {"ms": 1.0, "machine": {"gpu": "another"}, "versions": {"torch": "1.0"}}
    common.write([earlier, {"ms": 2.0}], str(path))
    first, second = json.loads(path.read_text())
    assert first == earlier
    assert second == {"ms": 2.0, **common.about()}
    assert second["versions"]["torch"] != "1.0"
