"""Device files and who may open them: by owner, group, mode bits and access control list.

The system is not asked whether a file can be opened, since it says yes to root about everything, and
knows nothing of a copied file system's users.
"""

from __future__ import annotations

import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from headrace.npu.doctor.sysroot import Sysroot, one_line

_READ_WRITE = 6

_ACL_USER, _ACL_MASK = 0x02, 0x10


@dataclass(frozen=True)
class Node:
    """A device file: who may open it."""

    path: str
    mode: int
    uid: int
    gid: int
    group: str
    users: tuple[int, ...] = ()
    """Ids of those whom an access control list lets read and write, such as who sits at the screen."""


@dataclass(frozen=True)
class User:
    """Who runs this."""

    uid: int
    name: str
    gids: frozenset[int]
    listed: frozenset[str]
    """Groups that name the user; a member gets the rights at the next login."""


def may_use(node: Node, user: User) -> bool:
    """Whether the user may read and write it."""
    if user.uid == 0 or user.uid in node.users:
        return True
    is_owner, is_member = user.uid == node.uid, node.gid in user.gids
    rights = node.mode >> (6 if is_owner else 3 if is_member else 0)
    return rights & _READ_WRITE == _READ_WRITE


def read_node(tree: Sysroot, path: str) -> Node | None:
    """None if there is no such file."""
    found = tree.stat(path)
    if found is None:
        return None
    group = {gid: name for name, gid, _ in _groups(tree)}.get(found.st_gid, str(found.st_gid))
    place = tree.resolve(path)
    users = () if place is None else _listed_users(place)
    return Node(path, found.st_mode & 0o777, found.st_uid, found.st_gid, group, users)


def read_user(tree: Sysroot) -> User | None:
    """Who runs this; None where /proc does not tell."""
    status = tree.text("/proc/self/status")
    ids = {
        name: [int(word) for word in re.findall(r"\b[0-9]{1,10}\b", words)]
        for name, words in re.findall(r"^(Uid|Gid|Groups):(.*)$", status, re.MULTILINE)
    }
    if len(ids.get("Uid", ())) < 2:
        return None
    uid = ids["Uid"][1]
    rows = (line.split(":") for line in tree.text("/etc/passwd").splitlines())
    name = next((one_line(row[0]) for row in rows if len(row) > 2 and row[2] == str(uid)), "")
    listed = frozenset(group for group, _, members in _groups(tree) if name and name in members)
    return User(uid, name, frozenset(ids.get("Groups", []) + ids.get("Gid", [])[1:2]), listed)


def _listed_users(place: Path) -> tuple[int, ...]:
    """Those whom the access control list of a file lets read and write."""
    try:
        raw = os.getxattr(place, "system.posix_acl_access")
    except OSError:
        return ()
    # a version, then entries of tag, permissions and id: acl(5), linux/posix_acl_xattr.h
    entries = list(struct.iter_unpack("<HHI", raw[4 : 4 + (len(raw) - 4) // 8 * 8]))
    mask = next((perm for tag, perm, _ in entries if tag == _ACL_MASK), 7)
    both = _READ_WRITE
    return tuple(
        uid for tag, perm, uid in entries if tag == _ACL_USER and perm & mask & both == both
    )


def _groups(tree: Sysroot) -> list[tuple[str, int, list[str]]]:
    """Name, id and members of each group."""
    rows = (line.split(":") for line in tree.text("/etc/group").splitlines())
    return [
        (one_line(row[0]), int(row[2]), row[3].split(","))
        for row in rows
        if len(row) == 4 and re.fullmatch(r"[0-9]{1,9}", row[2])
    ]
