"""`@record`: torchelastic's way to say which exception ended a rank."""

import os
import time

from torch.distributed.elastic.multiprocessing.errors import record


class DataError(Exception):
    pass


def load(rank):
    if rank == 1:
        raise DataError(f"shard {rank} is damaged")
    time.sleep(60)


@record
def main():
    print("errors go to", os.environ["TORCHELASTIC_ERROR_FILE"], flush=True)
    load(int(os.environ["RANK"]))


if __name__ == "__main__":
    main()
