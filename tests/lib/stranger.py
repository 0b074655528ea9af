# fmt: off
# ruff: noqa
"""Reads a checkpoint by docs/format.md alone: nothing of the library is imported. `read(folder)` gives names to arrays,
of bytes where numpy lacks the type, and the plain values of rank 0. Replicas and instances: the last rank's win."""
import base64, hashlib, json, math, re
from pathlib import Path
import numpy as np, safetensors.numpy, xxhash, zstandard
DTYPES = "F64 I64 U64 C64 F32 I32 U32 F16 BF16 I16 U16 F8_E4M3 F8_E5M2 I8 U8 BOOL C128 C32".split()
NUMPY = dict(zip(DTYPES, "<f8 <i8 <u8 <c8 <f4 <i4 <u4 <f2 - <i2 <u2 - - i1 u1 ? <c16".split()))
SIZES = dict(BF16=2, C32=4)  # of what numpy lacks, if not 1
COLUMNS = dict.fromkeys("name_ends dims dim_ends chunk_ends offset stored length base".split(), "<i8")
COLUMNS |= dict.fromkeys("ranks instances file".split(), "<i4")  # all others: u1
def sealed(path):
    return unsealed(path.read_bytes(), path)
def unsealed(raw, path):
    data = json.loads(raw)
    claimed = data.pop("digest")
    assert claimed == hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest(), path
    return data
def records(run):
    paths = sorted((run / "log").glob("*.json"))
    places = [path for path in paths if int(path.stem) % 256 == 0 and int(path.stem) and sealed(path)["type"] == "SNAPSHOT"]
    return [sealed(path) for path in paths if not places or path >= places[-1]]
def newest(run):
    back, live, place = {}, {}, lambda name: tuple(map(int, re.fullmatch(r"(\d+)\.(\d+)-\w+", name).groups()[::-1]))
    for record in records(run):
        body = record["body"]
        if record["type"] == "SNAPSHOT":
            back = {term: restored for term, _, restored in body["acquires"]}
            live = {one["checkpoint"]: one for one in body["commits"] if one["finite"] is not False}
        back.update({body["term"]: body["restored"]} if record["type"] == "ACQUIRE" else {})
        live.update({body["checkpoint"]: body} if record["type"] == "COMMIT" and body["finite"] is not False else {})
        for gone in body["retire"] if record["type"] == "PLAN" else ():
            live.pop(gone, None)
    limit = (math.inf, math.inf)
    for term in sorted(back, reverse=True):
        here = [name for name in live if place(name)[0] == term and place(name) <= limit]
        if here:
            return live[max(here, key=place)]
        limit = min(limit, place(back[term])) if back[term] and term <= limit[0] else limit
    raise SystemExit("no checkpoint")
def decode(codec, stored, base):
    if codec == 0:
        return stored
    planes = zstandard.ZstdDecompressor().stream_reader(stored[1:], read_across_frames=True).read()
    words = np.frombuffer(planes, np.uint8).reshape(stored[0], -1).T
    return (words.ravel() ^ np.frombuffer(base, np.uint8) if codec == 2 else words).tobytes()
def read(folder):
    run, found, aliases, values = Path(folder), {}, {}, None
    commit, major = newest(run), sealed(run / "FORMAT.json")["major"]
    for rank, digest in commit["manifests"]:
        path = run / "steps" / commit["checkpoint"] / f"rank-{rank:05}.json"
        part = sealed(path)
        assert [hashlib.sha256(path.read_bytes()).hexdigest(), major] == [digest, 3], path
        raw = base64.b64decode(part["table"])
        t = {name: bytes(column) for name, column in safetensors.numpy.load(raw).items()}
        t = {n: c if "digest" in n or n == "counts" else zstandard.decompress(c) for n, c in t.items()}
        t = {n: c if COLUMNS.get(n, "u1") == "u1" else np.frombuffer(c, COLUMNS[n]).tolist() for n, c in t.items()}
        files, names = json.loads(t["files"]), t["names"].decode()
        def chunk(i):
            file, base = np.memmap(run / files[t["file"][i]], np.uint8, "r"), t["base"][i]
            stored = bytes(file[t["offset"][i] : t["offset"][i] + t["stored"][i]])
            plain = decode(t["codec"][i], stored, chunk(base) if base >= 0 else b"")
            assert xxhash.xxh3_128_digest(plain) == t["digest"][16 * i : 16 * i + 16], (path, i)
            return plain
        for i in range(len(t["name_ends"])):
            start = lambda column: t[column][i - 1] if i else 0
            name, kind = names[start("name_ends") : t["name_ends"][i]], DTYPES[t["dtypes"][i]]
            dtype, tail = (NUMPY[kind], ()) if NUMPY.get(kind, "-") != "-" else ("u1", (SIZES.get(kind, 1),))
            shape, offsets, sizes = np.split(np.array(t["dims"][start("dim_ends") : t["dim_ends"][i]], int), 3)
            data = np.frombuffer(b"".join(map(chunk, range(start("chunk_ends"), t["chunk_ends"][i]))), dtype)
            box = tuple(slice(o, o + s) for o, s in zip(offsets, sizes))
            found.setdefault(name, np.zeros((*shape, *tail), dtype))[box] = data.reshape((*sizes, *tail))
        aliases |= json.loads(zstandard.decompress(base64.b64decode(part["layout"])))["aliases"]
        values = part["values"] if rank == 0 else values
    return found | {alias: found[name] for alias, name in aliases.items()}, values
