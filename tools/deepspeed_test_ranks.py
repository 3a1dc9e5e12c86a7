"""For the ranks of deepspeed_tests.py, which import it as they start: one that fails by pytest.fail ends as by an exception.

pytest's Failed is none, so that a rank's pool would wait for it until the test's limit.
"""

from __future__ import annotations

from typing import Any

from unit.common import DistributedExec  # of DeepSpeed's tests

_run = DistributedExec._dist_run


def _run_to_an_exception(self: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return _run(self, *args, **kwargs)
    except Exception:
        raise
    except BaseException as failed:
        raise RuntimeError(f"{type(failed).__name__}: {failed}") from None


DistributedExec._dist_run = _run_to_an_exception
