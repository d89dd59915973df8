"""Every system call fails once, and every power loss is replayed: `python -m tests.faults --help`.

shim.c, shim.py   a library around libc, loaded by LD_PRELOAD, that counts, fails and records calls on files
scenarios.py      the commands, what was there before, and how to tell whether what is there now is whole
runs.py           a command in a fork of a process that has imported everything
each_call.py      for every call of a command: it fails, then the same command runs again
record.py         the record of a run as changes of folders and files
power_loss.py     the states of the disk that a power loss may leave, judged in the same way
"""
