"""Several processes write one plan into one directory at the same moment; prints counts as JSON."""

import json
import os
import sys
import time
from pathlib import Path

from test_commit import write


def main(directory, writers, rounds):
    for number in range(rounds):
        start = time.time() + 0.05
        children = []
        for _ in range(writers):
            child = os.fork()
            if child == 0:
                code = 70
                try:
                    while time.time() < start:
                        pass
                    write(directory / str(number))
                    code = 0
                finally:
                    os._exit(code)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert codes == [0] * writers, codes
    print(json.dumps({"rounds": rounds, "writers": writers}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
