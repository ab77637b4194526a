"""The schemas of torch's attention kernels, as wheels of torch have them: no GPU is needed.

`python -m tests.cuda.sdpa_schemas WHEEL ...` writes sdpa_schemas.json, of builds for CPU or CUDA.
"""

from __future__ import annotations

import json
import re
import sys
import zipfile
from pathlib import Path

from symm_cp.ops.attention import kernels

RECORD = Path(__file__).with_name("sdpa_schemas.json")

#: The ops that symm_cp calls, and torch's op that chooses between them.
NAMES = sorted(
    {
        "_fused_sdp_choice",
        *(
            op.name().removeprefix("aten::")
            for op in vars(kernels).values()
            if hasattr(op, "_schema")
        ),
    }
)


def of_wheel(path: Path) -> tuple[str, dict[str, str]]:
    """Returns the version of a wheel, and the schemas that its library registers."""
    with zipfile.ZipFile(path) as wheel:
        library = wheel.read("torch/lib/libtorch_cpu.so")
    schemas = {}
    for name in NAMES:
        found = set(re.findall(rb"\0(%s\([^\0]*)\0" % name.encode(), library))
        assert len(found) == 1, (path, name, found)
        schemas[name] = found.pop().decode()
    return path.name.split("-")[1], schemas


def main() -> None:
    versions, schemas = zip(*(of_wheel(Path(path)) for path in sys.argv[1:]), strict=True)
    by_version = dict(zip(versions, schemas, strict=True))
    record: list[dict[str, object]] = []
    for version, known in sorted(by_version.items()):
        for same in record:
            if same["schemas"] == known:
                same["torch"].append(version)  # type: ignore[attr-defined]
                break
        else:
            record.append({"torch": [version], "schemas": known})
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
