"""Twenty prompts of many kinds and lengths, similar to the training text of the built-in model."""

from __future__ import annotations

PROMPTS = (
    "import os\n",
    "def fibonacci(n):\n",
    "class Stack:\n    def __init__(self):\n",
    ".. function:: open(file)\n\n",
    'def clamp(x, low, high):\n    """Return x limited to the range low to high."""\n',
    "for i in range(10):\n    print(i",
    "with open(path) as f:\n    for line in f:\n        ",
    "try:\n    import json\nexcept ImportError:\n",
    "The :mod:`csv` module implements classes to read and write tabular data",
    "async def main():\n    reader, writer = await asyncio.open_connection(",
    "@dataclass\nclass Point:\n    x: int\n    y: int\n\n    def ",
    "if __name__ == '__main__':\n    unittest.main()\n\n\nclass TestQueue(unittest.TestCase):\n    def test_",
    "x",
    "Raises :exc:`ValueError` if",
    "import re\n\npattern = re.compile(r'",
    "# Copyright (C) 2001 Python Software Foundation\n",
    "def merge(left, right):\n    result = []\n    i = j = 0\n    while i < len(left) and j < len(right):\n"
    "        if left[i] <= right[j]:\n            result.append(left[i])\n            i += 1\n        else:\n",
    "from collections import OrderedDict, defaultdict, deque, namedtuple\nfrom itertools import chain, count\n\n"
    "def group_by(items, key):\n    groups = defaultdict(list)\n    for item in items:\n",
    "The following example shows how a child logger is obtained, how a handler is put on it, and how records of the "
    "child reach the handlers of its parents. Levels are checked where a record is made and again by each "
    "handler; a level that is not set is taken from the nearest parent that has one::\n\n    import logging\n",
    "def parse_args(argv):\n    parser = argparse.ArgumentParser(description='Count words.')\n"
    "    parser.add_argument('files', nargs='*', help='files to read, standard input if none')\n"
    "    parser.add_argument('-n', '--number', type=int, default=10, help='how many words to show')\n"
    "    parser.add_argument('-i', '--ignore-case', action='store_true')\n    return ",
)
