"""Opens, reads, writes and locks files that only the user can change.

The native library runs as the user who loads it, so anyone who can change or replace it, or a
folder above it, runs code as that user. A folder or file is *trusted* if

- its owner is root, the effective user, or the owner of this package (who could change the package
  as well), and
- nobody else can write it. A folder with the sticky bit (`/tmp`) may be writable, because only
  owners can rename or remove their files in it. Its group may write it if that is the owner's
  private group: the owner's primary group, of the owner's name, and without other members. Many
  distributions make such folders (umask 002).

This applies to all folders from `/` down, and the owners of symbolic links on the way must be
trusted as well. Each name is opened relative to its opened folder, without following links, and the
descriptor is checked instead of the name: nothing can be replaced between check and use. The file
itself must not be a link.

In a user namespace (a rootless container) folders such as `/` and `/home` belong to an owner
outside the namespace, who appears as the overflow user; such a *folder* is accepted like root's, a
file is not.
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

_NAME = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Does not block on a FIFO instead of a file.
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
#: Access control lists beside the mode. The mode's group bits bound their rights from above, but
#: do not show which users they name.
_LISTS = ("system.posix_acl_access", "system.nfs4_acl", "system.richacl")
_MAX_LINKS = 40  # as in the kernel


class UntrustedError(PermissionError):
    """Another user owns or could change a file or folder, which the message names."""


def owners() -> frozenset[int]:
    """Returns the users whose files are trusted."""
    return frozenset((0, os.geteuid(), os.stat(__file__).st_uid))


def is_outside_namespace(uid: int) -> bool:
    """Whether a user id stands for users that this user namespace does not map."""
    return _is_unmapped(uid, "uid")


def _is_unmapped(number: int, kind: str) -> bool:
    with suppress(OSError, ValueError):
        if number != int(Path(f"/proc/sys/kernel/overflow{kind}").read_text()):
            return False
        for line in Path(f"/proc/self/{kind}_map").read_text().splitlines():
            first, _, count = map(int, line.split())
            if first <= number < first + count:
                return False
        return True
    return False


def _writers_in_group(owner: int, gid: int) -> str | None:
    """Names the users other than the owner who have a group's write access, if any.

    None for the owner's private group. Like sshd, relies on the databases of users and groups, and
    requires that the group has the owner's name, since network databases may not list everybody.
    """
    try:
        user, group = pwd.getpwuid(owner), grp.getgrgid(gid)
    except KeyError:
        return f"group {gid}"
    if _is_unmapped(gid, "gid"):  # stands for any group outside of the user namespace
        return f"group {gid}"
    members = {entry.pw_name for entry in pwd.getpwall() if entry.pw_gid == gid}
    if others := sorted(members.union(group.gr_mem) - {user.pw_name}):
        return f"group {group.gr_name!r} with {', '.join(others)}"
    if (user.pw_gid, user.pw_name) == (gid, group.gr_name):
        return None
    return f"group {group.gr_name!r}"


def _has_list(fd: int, name: str) -> bool:
    try:
        os.getxattr(f"/proc/self/fd/{fd}", name)  # by name: O_PATH descriptors cannot be read
    except OSError as error:
        return error.errno not in (errno.ENODATA, errno.ENOTSUP)
    return True


def _writers(fd: int, about: os.stat_result) -> str | None:
    """Names the users other than the owner who can write an open file or folder, if any."""
    if about.st_mode & stat.S_IWOTH:
        return "everybody"
    if not about.st_mode & stat.S_IWGRP:
        return None
    if any(_has_list(fd, name) for name in _LISTS):
        return "an access control list"
    return _writers_in_group(about.st_uid, about.st_gid)


def _problem(fd: int, about: os.stat_result) -> str | None:
    """Returns why a file, folder or link is not trusted; None if it is."""
    trusted = owners()
    if about.st_uid not in trusted and not (
        stat.S_ISDIR(about.st_mode) and is_outside_namespace(about.st_uid)
    ):
        users = " or ".join(str(uid) for uid in sorted(trusted))
        return f"it belongs to user {about.st_uid}, not to user {users}"
    sticky = stat.S_ISDIR(about.st_mode) and about.st_mode & stat.S_ISVTX
    if sticky or stat.S_ISLNK(about.st_mode):
        return None
    if writers := _writers(fd, about):
        return f"others can write it (mode {stat.S_IMODE(about.st_mode):o}: {writers})"
    return None


def _check(fd: int, path: str | Path) -> os.stat_result:
    about = os.fstat(fd)
    problem = _problem(fd, about)
    if problem is not None:
        raise UntrustedError(f"{path}: {problem}")
    return about


def _about(error: OSError, path: str | Path) -> OSError:
    """Returns the error with the whole path instead of a name in an opened folder."""
    return OSError(error.errno, error.strerror, str(path))


def _make(name: str, parent: int) -> None:
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent)


def _enter(name: str, parent: int) -> int:
    """Opens a name without following links; opens a folder for reading if permitted."""
    fd = os.open(name, _NAME, dir_fd=parent)
    if not stat.S_ISDIR(os.fstat(fd).st_mode):
        return fd
    with suppress(OSError):
        # Unlike O_PATH this makes an automounter mount the folder.
        opened = os.open(name, _FOLDER, dir_fd=parent)
        os.close(fd)
        return opened
    return fd


def _open_folder(path: Path, *, create: bool) -> int:
    """Opens a folder step by step from the root; `create` makes missing ones (mode 700)."""
    pending = list(reversed(path.absolute().parts))
    at, where, links = os.open("/", _NAME), "/", 0
    try:
        while pending:
            name = pending.pop()
            child = os.path.join(where, name)  # "/" for "/"
            try:
                try:
                    fd = _enter(name, at)
                except FileNotFoundError:
                    if not create:
                        raise
                    _make(name, at)
                    fd = _enter(name, at)
            except OSError as error:
                raise _about(error, child) from None
            about = os.fstat(fd)
            if stat.S_ISLNK(about.st_mode):
                links += 1
                target = _target(fd, child, links)
                pending += reversed(Path(target).parts)
                continue
            at, where, fd = fd, child, at
            os.close(fd)
            _check(at, where)
            if not stat.S_ISDIR(about.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), child)
    except BaseException:
        os.close(at)
        raise
    return at


def _target(fd: int, path: str, links: int) -> str:
    """Returns the target of a link, and closes its descriptor."""
    try:
        _check(fd, path)
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        return os.readlink("", dir_fd=fd)
    finally:
        os.close(fd)


@contextmanager
def folder(path: Path, *, create: bool = False) -> Iterator[int]:
    """Yields a descriptor of a trusted folder, for use as `dir_fd`; `create` makes it if missing.

    Raises `UntrustedError`, and other `OSError`s if it cannot be opened or made.
    """
    fd = _open_folder(path, create=create)
    try:
        yield fd
    finally:
        os.close(fd)


def _open(path: Path, flags: int, parent: int) -> int:
    """Opens a trusted regular file in an opened folder."""
    try:
        fd = os.open(path.name, flags | _FILE, 0o600, dir_fd=parent)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UntrustedError(f"{path}: it is a symbolic link, not a file") from None
        raise _about(error, path) from None
    try:
        if not stat.S_ISREG(_check(fd, path).st_mode):
            raise UntrustedError(f"{path}: it is not a regular file")
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_to_read(path: Path) -> int:
    """Returns a descriptor of a trusted file, which the caller closes; raises like `folder`."""
    with folder(path.parent) as parent:
        return _open(path, os.O_RDONLY, parent)


def read(path: Path) -> bytes:
    """Returns the content of a trusted file; raises like `folder`."""
    with open(open_to_read(path), "rb") as file:
        return file.read()


def write(path: Path, content: bytes) -> None:
    """Atomically replaces a file in a trusted folder; makes the folder if missing.

    Only the user can write the new file. Raises like `folder`.
    """
    with folder(path.parent, create=True) as parent:
        scratch = f".{path.name}.{secrets.token_hex(8)}"
        try:
            fd = os.open(
                scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o600, dir_fd=parent
            )
            with open(fd, "wb") as file:
                file.write(content)
                os.fchmod(fd, 0o644)  # whatever the umask
            os.replace(scratch, path.name, src_dir_fd=parent, dst_dir_fd=parent)
        except OSError as error:
            with suppress(OSError):
                os.unlink(scratch, dir_fd=parent)
            raise _about(error, path) from None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a lock on a trusted file; makes the file if missing; raises like `folder`."""
    with folder(path.parent) as parent:
        fd = _open(path, os.O_RDWR | os.O_CREAT, parent)
    with open(fd, "rb"):
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield


def write_output(path: Path, content: str | bytes) -> None:
    """Writes a file that the user has named, in any folder.

    Like the kernel with `protected_symlinks` and `protected_regular`, refuses to follow another
    user's link, and to write another user's file in a folder where everybody can make files.
    Raises `UntrustedError` and other `OSError`s.
    """
    data = content.encode() if isinstance(content, str) else content
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        if os.lstat(path).st_uid not in owners():
            raise UntrustedError(f"{path}: it is a symbolic link of another user") from None
        fd = os.open(path, flags, 0o666)
    with open(fd, "wb") as file:
        about = os.fstat(fd)
        if stat.S_ISREG(about.st_mode):
            public = os.stat(path.parent).st_mode & stat.S_IWOTH
            if public and about.st_uid not in owners():
                raise UntrustedError(f"{path}: it is a file of another user")
            os.ftruncate(fd, 0)
        file.write(data)
