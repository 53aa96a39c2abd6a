"""Processes for code that nobody trusts.

`bubblewrap` makes a sandbox, `sandbox` starts something in it, and a `fork_server` forks further ones of it, which is
quicker. `limits`, `cgroups` and the filter of system calls (`seccomp`, `syscalls`) bound what is inside, `cpu_deadline`
how long it may take, by what `process_tree` says of its processes. What runs in there is in `inside`.
"""
