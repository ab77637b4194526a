"""Opens, reads, writes and locks files that only the user can change.

The native library runs as the user who loads it, so anyone who can change or replace it, or a
folder above it, runs code as that user. A folder or file is *trusted* if

- its owner is root, the effective user, or the owner of this package (who could change the package
  as well), and
- nobody else can write it. A folder with the sticky bit (`/tmp`) may be writable, because only
  owners can rename or remove their files in it. Its group may write it if that is the owner's
  private group, as many distributions make folders (umask 002).

All folders and links from `/` down are checked; whoever cannot write them cannot replace a file
between its check and its use. The file itself must not be a link, and is checked once it is open.
"""

from __future__ import annotations

import errno
import fcntl
import grp
import os
import pwd
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Does not block on a FIFO instead of a file.
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
#: Access control lists: the mode's group bits bound their rights, but do not show whom they name.
_LISTS = {"system.posix_acl_access", "system.nfs4_acl", "system.richacl"}
_MAX_LINKS = 40  # as in the kernel


class UntrustedError(PermissionError):
    """Another user owns or could change a file or folder, which the message names."""


def owners() -> frozenset[int]:
    """Returns the users whose files are trusted."""
    return frozenset((0, os.geteuid(), os.stat(__file__).st_uid))


def is_outside_namespace(uid: int) -> bool:
    """Whether a user id stands for users that this user namespace does not map.

    In a rootless container, `/` and `/home` may belong to them: such folders are trusted.
    """
    with suppress(OSError, ValueError):
        lines = Path("/proc/self/uid_map").read_text().splitlines()
        ranges = [tuple(map(int, line.split())) for line in lines]
        return uid == int(Path("/proc/sys/kernel/overflowuid").read_text()) and not any(
            first <= uid < first + count for first, _, count in ranges
        )
    return False


def _is_private_group(about: os.stat_result, opened: int | str) -> bool:
    """Whether only the owner is in the group, by the databases of users and groups, like sshd."""
    try:
        user, group = pwd.getpwuid(about.st_uid), grp.getgrgid(about.st_gid)
    except KeyError:
        return False
    members = {entry.pw_name for entry in pwd.getpwall() if entry.pw_gid == group.gr_gid}
    with suppress(OSError):  # a file system without attributes
        if _LISTS.intersection(os.listxattr(opened)):
            return False
    # A network's databases may not list all members, so the name must be the user's as well.
    own = (user.pw_gid, user.pw_name) == (group.gr_gid, group.gr_name)
    return own and members.union(group.gr_mem) <= {user.pw_name}


def _check(about: os.stat_result, path: str | Path, opened: int | str) -> None:
    """Raises `UntrustedError` unless a file, folder or link is trusted."""
    trusted, is_folder = owners(), stat.S_ISDIR(about.st_mode)
    ours = about.st_uid in trusted
    if not ours and not (is_folder and is_outside_namespace(about.st_uid)):
        users = " or ".join(str(uid) for uid in sorted(trusted))
        raise UntrustedError(f"{path}: it belongs to user {about.st_uid}, not to user {users}")
    if stat.S_ISLNK(about.st_mode) or (is_folder and about.st_mode & stat.S_ISVTX):
        return
    by_group = about.st_mode & stat.S_IWGRP and not (ours and _is_private_group(about, opened))
    if about.st_mode & stat.S_IWOTH or by_group:
        mode = stat.S_IMODE(about.st_mode)
        raise UntrustedError(f"{path}: others can write it (mode {mode:o})")


def check_folder(path: Path, *, create: bool = False) -> None:
    """Raises `UntrustedError` unless a folder, and all that leads to it, is trusted.

    `create` makes missing folders (mode 700). Raises other `OSError`s as well.
    """
    at, pending, links = "/", list(reversed(path.absolute().parts)), 0
    while pending:
        at = os.path.join(at, pending.pop())  # "/" for "/"
        if create and not os.path.lexists(at):
            with suppress(FileExistsError):
                os.mkdir(at, 0o700)
        about = os.lstat(at)
        if stat.S_ISDIR(about.st_mode):
            about = os.lstat(os.path.join(at, "."))  # an automounter mounts the folder for this
        _check(about, at, at)
        if stat.S_ISLNK(about.st_mode):
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), at)
            pending += reversed(Path(os.readlink(at)).parts)
            at = os.path.dirname(at)


def _open(path: Path, flags: int) -> int:
    check_folder(path.parent)
    try:
        fd = os.open(path, flags | _FILE, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UntrustedError(f"{path}: it is a symbolic link, not a file") from None
        raise
    try:
        about = os.fstat(fd)
        _check(about, path, fd)
        if not stat.S_ISREG(about.st_mode):
            raise UntrustedError(f"{path}: it is not a regular file")
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_to_read(path: Path) -> int:
    """Returns a descriptor, which the caller closes; raises like `check_folder`."""
    return _open(path, os.O_RDONLY)


def read(path: Path) -> bytes:
    """Returns the content of a trusted file; raises like `check_folder`."""
    with open(open_to_read(path), "rb") as file:
        return file.read()


def write(path: Path, content: bytes) -> None:
    """Atomically replaces a file in a trusted folder; makes the folder if missing.

    Only the user can write the new file. Raises like `check_folder`.
    """
    check_folder(path.parent, create=True)
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), 0o644)  # whatever the umask
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a lock on a trusted file; makes the file if missing; raises like `check_folder`."""
    with open(_open(path, os.O_RDWR | os.O_CREAT), "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_output(path: Path, content: str | bytes) -> None:
    """Writes a file that the user has named, in any folder.

    Like the kernel with `protected_symlinks` and `protected_regular`, refuses to follow another
    user's link, and to write another user's file in a folder where everybody can make files.
    Raises `UntrustedError` and other `OSError`s.
    """
    is_link = path.is_symlink()
    if is_link and path.lstat().st_uid not in owners():
        raise UntrustedError(f"{path}: it is a symbolic link of another user")
    follow = 0 if is_link else os.O_NOFOLLOW  # not a link that is made meanwhile
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | follow, 0o666)
    with open(fd, "wb") as file:
        about = os.fstat(fd)
        if stat.S_ISREG(about.st_mode):
            public = os.stat(path.parent).st_mode & stat.S_IWOTH
            if public and about.st_uid not in owners():
                raise UntrustedError(f"{path}: it is a file of another user")
            os.ftruncate(fd, 0)
        file.write(content.encode() if isinstance(content, str) else content)
