# fmt: off
# ruff: noqa
"""Reads a checkpoint by docs/format.md alone: nothing of the library is imported. `read(folder)` gives names to arrays,
of bytes where numpy lacks the type, and the plain values of rank 0. Replicas and instances: the last rank's win."""
import hashlib, json, math, re, struct
from pathlib import Path
import numpy as np, safetensors.numpy, xxhash, zstandard
DTYPES = "F64 I64 U64 C64 F32 I32 U32 F16 BF16 I16 U16 F8_E4M3 F8_E5M2 I8 U8 BOOL C128 C32".split()
NUMPY = dict(F64="<f8", I64="<i8", U64="<u8", C64="<c8", F32="<f4", I32="<i4", U32="<u4", F16="<f2", I16="<i2",
             U16="<u2", I8="i1", BOOL="?", C128="<c16")
SIZES = dict(F64=8, I64=8, U64=8, C64=8, F32=4, I32=4, U32=4, F16=2, BF16=2, I16=2, U16=2, C128=16, C32=4)
def sealed(path):
    data = json.loads(path.read_bytes())
    claimed = data.pop("digest")
    assert claimed == hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest(), path
    return data
def newest(run):
    back, live = {}, {}
    for record in (sealed(path) for path in sorted((run / "log").glob("*.json"))):
        body = record["body"]
        if record["type"] == "ACQUIRE":
            back[body["epoch"]] = body["restored"]
        elif record["type"] == "COMMIT" and body["finite"] is not False:
            live[body["attempt"]] = body
        for gone in body["retire"] if record["type"] == "PLAN" else ():
            live.pop(gone, None)
    def place(name):
        found = re.fullmatch(r"(\d+)\.(\w+)-(\d+)", name)
        return int(found[1]), int(found[3])
    limit = (math.inf, math.inf)
    for epoch in sorted(back, reverse=True):
        here = [a for a in live if place(a)[0] == epoch and place(a) <= limit] if epoch <= limit[0] else []
        if here:
            return live[max(here, key=place)]
        if epoch <= limit[0] and back[epoch]:
            limit = min(limit, place(back[epoch]))
    raise SystemExit("no checkpoint")
def order(words, bits):  # floats as integers in the order of the numbers; its own inverse
    return words ^ ((words.view(f"<i{bits // 8}") >> (bits - 1)).view(words.dtype) >> 1)
met = set()  # codecs that were read, for the tests
def decode(codec, stored, length, base):
    met.add(codec)
    if codec == 0:
        return stored
    if codec == 5:  # fp32 rounded to bf16
        wide = np.frombuffer(base, "<u4").astype(np.uint64)
        half = ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype("<u2")
        half[(wide & 0x7FFFFFFF) > 0x7F800000] = 0x7FC0
        return half.tobytes()
    word, at, planes = stored[0], 1 + 4 * stored[0], []
    for size in struct.unpack_from(f"<{word}I", stored, 1):
        plane, at = stored[at : at + size], at + size
        planes.append(plane if size == length // word else zstandard.decompress(plane))
    words = np.frombuffer(b"".join(planes), np.uint8).reshape(word, -1).T.copy().view(f"<u{word}")[:, 0]
    if codec == 2:
        words = words >> 1 | words << (8 * word - 1)
    elif codec in (3, 4):
        old, words = np.frombuffer(base, words.dtype), words >> 1 ^ (~(words & 1) + 1)
        words = order(words + order(old, 8 * word), 8 * word) if codec == 4 else words + old
    return words.tobytes()
def read(folder):
    run, found, values = Path(folder), {}, None
    assert sealed(run / "FORMAT.json")["major"] == 1
    commit = newest(run)
    for rank, number, digest in commit["parts"]:
        path = run / "parts" / f"{commit['attempt']}.{rank}.{number}.json"
        assert hashlib.sha256(path.read_bytes()).hexdigest() == digest
        part, raw = sealed(path), path.with_suffix(".safetensors").read_bytes()
        assert hashlib.sha256(raw).hexdigest() == part["table"]
        t = {name: column.tolist() if name != "digest" else column for name, column in safetensors.numpy.load(raw).items()}
        packs, names = json.loads(bytes(t["packs"])), bytes(t["names"]).decode()
        def blob(i):
            with open(run / packs[t["pack"][i]], "rb") as file:
                file.seek(t["offset"][i])
                stored = file.read(t["stored"][i])
            base, at = b"", t["base"][i]
            while at >= 0 and len(base) < t["length"][i] * (2 if t["codec"][i] == 5 else 1):
                base, at = base + blob(at), at + 1
            plain = decode(t["codec"][i], stored, t["length"][i], base)
            assert xxhash.xxh3_128_digest(plain) == bytes(np.ravel(t["digest"])[16 * i : 16 * i + 16]), (path, i)
            return plain
        for i in range(len(t["name_ends"])):
            start = lambda column: t[column][i - 1] if i else 0
            name, kind = names[start("name_ends") : t["name_ends"][i]], DTYPES[t["dtypes"][i]]
            shape, offsets, sizes = np.split(np.array(t["dims"][start("dim_ends") : t["dim_ends"][i]], int), 3)
            data = np.frombuffer(b"".join(map(blob, range(start("blob_ends"), t["blob_ends"][i]))), NUMPY.get(kind, "u1"))
            tail = () if kind in NUMPY else (SIZES.get(kind, 1),)
            whole = found.setdefault(name, np.zeros((*shape, *tail), data.dtype))
            whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes))] = data.reshape((*sizes, *tail))
        for alias, name in part["layout"]["aliases"].items():
            found[alias] = name
        values = part["values"] if rank == 0 else values
    return {name: found[a] if isinstance(a, str) else a for name, a in found.items()}, values
