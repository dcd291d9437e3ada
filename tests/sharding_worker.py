"""One of the processes of test_sharding.py: runs every check and writes what failed.

python sharding_worker.py RANK WORLD_SIZE STORE REPORT [CHECK ...]
"""

import datetime
import json
import os
import sys
import time
import traceback

import sharding_checks
import sharding_checks_compile  # noqa: F401  adds its checks, and those of the two modules that it imports
import torch
import torch.distributed as dist


def main():
    rank, world, store, result = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
    }
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=60),
    )
    only = sys.argv[5:]
    failed = {}
    for name, function in sharding_checks.CHECKS.items():
        if only and name not in only:
            continue
        start = time.perf_counter()
        try:
            function()
            failed[name] = ""
            print(f"{name} {time.perf_counter() - start:.1f} s", file=sys.stderr)
        except BaseException:
            failed[name] = traceback.format_exc()
            break  # ranks may have parted
    with open(result, "w", encoding="utf-8") as file:
        json.dump(failed, file)
    if not any(failed.values()):
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
