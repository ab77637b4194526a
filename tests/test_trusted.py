"""Files and folders that another user could change are refused, at every step of a path.

Works as root and as an ordinary user: other users are simulated by what `owners` says.
"""

from __future__ import annotations

import grp
import os
import pwd
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from symm_cp import trusted

ME = os.geteuid()
STRANGER = 54321  # owns nothing here


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A trusted file, below two trusted folders."""
    file = tmp_path / "outer" / "inner" / "file"
    trusted.write(file, b"content")
    return file


def give_away(monkeypatch: pytest.MonkeyPatch, is_theirs: Callable[[int], bool]) -> None:
    """Makes files and folders belong to another user, all others to root."""

    def status(real: Callable[[Any], os.stat_result], path: Any) -> os.stat_result:
        about = real(path)
        uid = STRANGER if is_theirs(about.st_ino) else 0
        return os.stat_result((*about[:4], uid, *about[5:]))

    for name in ("fstat", "lstat"):
        monkeypatch.setattr(os, name, partial(status, getattr(os, name)))


@pytest.fixture
def as_stranger(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Makes everything below `tmp_path` belong to another user."""
    above = {path.stat().st_ino for path in (tmp_path, *tmp_path.parents)}
    give_away(monkeypatch, lambda inode: inode not in above)


class Users:
    """The databases of users and groups: the test's user, with a private group and no others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gid: int) -> None:
        self.me = SimpleNamespace(pw_name="me", pw_uid=ME, pw_gid=gid)
        self.group = SimpleNamespace(gr_name="me", gr_gid=gid, gr_mem=[])
        self.users = [self.me]
        monkeypatch.setattr(pwd, "getpwall", lambda: self.users)
        monkeypatch.setattr(pwd, "getpwuid", self.by_uid)
        monkeypatch.setattr(grp, "getgrgid", lambda gid: {self.group.gr_gid: self.group}[gid])

    def by_uid(self, uid: int) -> SimpleNamespace:
        return {user.pw_uid: user for user in self.users}[uid]


@pytest.fixture
def users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Users:
    return Users(monkeypatch, tmp_path.stat().st_gid)


@pytest.fixture
def shared_group(users: Users) -> None:
    users.group.gr_mem = ["me", "other"]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    before = descriptors()
    yield
    assert descriptors() == before


def test_read_returns_what_was_written(place: Path) -> None:
    assert trusted.read(place) == b"content"
    trusted.write(place, b"other")
    assert trusted.read(place) == b"other"
    assert [path.name for path in place.parent.iterdir()] == ["file"]
    assert place.stat().st_mode & 0o777 == 0o644
    assert {path.stat().st_mode & 0o777 for path in place.parents[:2]} == {0o700}


@pytest.mark.parametrize("umask", [0, 0o002, 0o077])
def test_modes_do_not_follow_the_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        trusted.write(tmp_path / "folder" / "file", b"content")
    finally:
        os.umask(before)
    assert trusted.read(tmp_path / "folder" / "file") == b"content"


@pytest.mark.parametrize("mode", [0o666, 0o660, 0o602])
def test_a_file_that_others_can_write(place: Path, shared_group: None, mode: int) -> None:
    place.chmod(mode)
    with pytest.raises(trusted.UntrustedError, match=rf"file: others can write .*mode {mode:o}"):
        trusted.read(place)


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_on_the_way_that_others_can_write(
    place: Path, shared_group: None, level: int, mode: int
) -> None:
    place.parents[level].chmod(mode)
    for use in (
        lambda: trusted.read(place),
        lambda: trusted.write(place, b""),
        lambda: trusted.locked(place).__enter__(),
    ):
        with pytest.raises(trusted.UntrustedError, match=f"others can write .*mode {mode:o}"):
            use()
    assert place.read_bytes() == b"content"


def test_a_private_group_is_nobody_else(place: Path, users: Users) -> None:
    """As under a umask of 002, by which ~/.cache has mode 775."""
    before = os.umask(0o002)
    try:
        cache = place.parent / ".cache"
        cache.mkdir()
        assert cache.stat().st_mode & 0o777 == 0o775
        trusted.write(cache / "symm_cp" / "file", b"content")
    finally:
        os.umask(before)
    assert trusted.read(cache / "symm_cp" / "file") == b"content"
    users.group.gr_mem = ["me"]
    assert trusted.read(cache / "symm_cp" / "file") == b"content"


def test_groups_that_are_not_private(place: Path, users: Users) -> None:
    place.parent.chmod(0o775)

    def refused() -> None:
        with pytest.raises(trusted.UntrustedError, match=r"inner: others can .*\(mode 775\)"):
            trusted.read(place)

    users.group.gr_mem = ["me", "other"]
    refused()
    users.group.gr_mem = []
    users.users.append(SimpleNamespace(pw_name="next", pw_uid=ME + 1, pw_gid=users.me.pw_gid))
    refused()
    users.users.pop()
    users.group.gr_name = "staff"
    refused()  # a network's database may not list its members
    users.group.gr_name, users.me.pw_gid = "me", users.me.pw_gid + 1
    refused()
    users.group.gr_gid += 1
    refused()
    users.group.gr_gid -= 1
    users.me.pw_gid -= 1
    trusted.read(place)


def test_lists_of_users_beside_the_mode(place: Path, users: Users) -> None:
    undefined = 0xFFFFFFFF
    entries = ((1, 7, undefined), (2, 7, STRANGER), (4, 0, undefined), (16, 7, undefined))
    acl = struct.pack("<I", 2) + b"".join(
        struct.pack("<HHI", *entry) for entry in (*entries, (32, 5, undefined))
    )
    try:
        os.setxattr(place.parent, "system.posix_acl_access", acl)
    except OSError:
        pytest.skip("this file system has no access control lists")
    assert place.parent.stat().st_mode & 0o777 == 0o775  # the bits of the group are the list's mask
    with pytest.raises(trusted.UntrustedError, match=r"others can .*\(mode 775\)"):
        trusted.read(place)


def test_sticky_folders_are_trusted(place: Path) -> None:
    place.parents[1].chmod(0o1777)
    assert trusted.read(place) == b"content"


def test_files_of_another_user(place: Path, as_stranger: None) -> None:
    with pytest.raises(trusted.UntrustedError, match=f"belongs to user {STRANGER}, not to user"):
        trusted.read(place)
    with pytest.raises(trusted.UntrustedError, match="belongs to user"):
        trusted.write(place.with_name("new"), b"")
    assert not place.with_name("new").exists()


def test_a_file_of_another_user_in_a_trusted_folder(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a sticky folder, where everybody can make files."""
    inode = place.stat().st_ino
    give_away(monkeypatch, lambda other: other == inode)
    with pytest.raises(trusted.UntrustedError, match=f"file: it belongs to user {STRANGER}"):
        trusted.read(place)


def test_a_folder_from_outside_of_the_user_namespace(
    place: Path, as_stranger: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trusted, "is_outside_namespace", lambda uid: uid == STRANGER)
    trusted.check_folder(place.parent)
    with pytest.raises(trusted.UntrustedError, match="file: it belongs to user"):
        trusted.read(place)
    place.parent.chmod(0o775)  # the group is unknown as well
    with pytest.raises(trusted.UntrustedError, match="inner: others can write"):
        trusted.check_folder(place.parent)


def test_links_of_trusted_users_are_followed(place: Path, tmp_path: Path) -> None:
    (tmp_path / "absolute").symlink_to(place.parent)
    (tmp_path / "relative").symlink_to("outer/../outer/inner")
    (tmp_path / "both").symlink_to("absolute")
    for name in ("absolute", "relative", "both"):
        assert trusted.read(tmp_path / name / "file") == b"content"
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        trusted.read(tmp_path / "loop" / "file")


def test_links_of_other_users_are_refused(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    link.symlink_to(place.parent)
    inode = link.lstat().st_ino
    give_away(monkeypatch, lambda other: other == inode)
    with pytest.raises(trusted.UntrustedError, match="link: it belongs to user"):
        trusted.read(link / "file")


def test_a_link_instead_of_a_file_is_refused(place: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    link = place.with_name("link")
    link.symlink_to(victim)
    with pytest.raises(trusted.UntrustedError, match="symbolic link"):
        trusted.read(link)
    with pytest.raises(trusted.UntrustedError, match="symbolic link"), trusted.locked(link):
        pass
    trusted.write(link, b"new")  # instead of the link
    assert victim.read_text() == "precious"
    assert trusted.read(link) == b"new"


def test_a_file_that_replaces_another_after_the_folders_check(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What counts is the file that was opened, not the one that had the name before."""
    other = place.with_name("other")
    other.write_bytes(b"other")
    other.chmod(0o666)
    check = trusted.check_folder

    def check_and_replace(path: Path, *, create: bool = False) -> None:
        check(path, create=create)
        other.replace(place)

    monkeypatch.setattr(trusted, "check_folder", check_and_replace)
    with pytest.raises(trusted.UntrustedError, match="file: others can write"):
        trusted.read(place)


def test_only_regular_files(place: Path) -> None:
    os.mkfifo(place.with_name("fifo"))
    for name in ("fifo", "."):
        with pytest.raises(OSError, match=r"not a regular file|directory"):
            trusted.read(place.parent / name)
    with pytest.raises(NotADirectoryError, match="inner/file"):
        trusted.read(place / "below")
    with pytest.raises(FileNotFoundError, match="outer/nothing"):
        trusted.read(place.parents[1] / "nothing" / "file")


def test_a_failed_write_leaves_nothing(place: Path) -> None:
    (place.parent / "folder" / "below").mkdir(parents=True)
    with pytest.raises(OSError, match="folder"):
        trusted.write(place.parent / "folder", b"")
    assert sorted(path.name for path in place.parent.iterdir()) == ["file", "folder"]


def test_a_lock_is_exclusive_and_keeps_what_is_in_the_file(place: Path) -> None:
    code = f"""
import fcntl
file = open({str(place)!r})
try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("locked")
"""
    with trusted.locked(place):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "locked\n"
    assert place.read_bytes() == b"content"
    with trusted.locked(place):
        pass


def test_outputs_go_where_the_user_says(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    out, link = tmp_path / "out", tmp_path / "link"
    trusted.write_output(out, "long text")
    trusted.write_output(out, b"text")
    assert out.read_text() == "text"
    link.symlink_to(out)
    trusted.write_output(link, "by my link")
    assert out.read_text() == "by my link"
    trusted.write_output(Path("/dev/null"), "text")
    assert not Path("/dev/null").is_file()


def test_outputs_do_not_follow_the_links_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o1777)
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_text("precious")
    link.symlink_to(victim)
    monkeypatch.setattr(trusted, "owners", lambda: frozenset([STRANGER]))
    for path, what in ((link, "link"), (victim, "file")):
        with pytest.raises(trusted.UntrustedError, match=f"{what} of another user"):
            trusted.write_output(path, "text")
    assert victim.read_text() == "precious"
    tmp_path.chmod(0o755)  # only its owner can write: the user chose it
    trusted.write_output(victim, "text")
    assert victim.read_text() == "text"
