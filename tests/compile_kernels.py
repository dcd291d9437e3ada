"""Compiles the kernels exactly as the launchers would, for GPUs that need not be there; says what the compiler made.

Run by test_compiled.py in a process of its own, since Triton decides at import whether it compiles or interprets:
    python tests/compile_kernels.py                                every case of every target, as JSON
    python tests/compile_kernels.py sm_90 forward/bfloat16/gelu    these cases (default: all) of one target
    python tests/compile_kernels.py --write                        tests/compile_budget.csv anew, the table of sm_90
    python tests/compile_kernels.py --raise                        the table's entries where this Triton makes more
Run --write with one Triton and --raise with the others that the table should hold for. PYTHONPATH must hold the
repository where xfused is not installed. The JSON is target -> case -> facts, or target -> reason where this Triton
does not know the target. A case is kernel/dtype/activation, with /variant for anything but the plain call.

On sm_90 every activation is a class of its own in bf16: hardly two have the same code. In fp16 the code differs by
conversions and comparisons only, so one activation of each kind stands for the rest; in fp32 it differs where there is
an exponential, and those are all here.
"""

import csv
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
import triton.language as tl
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.cache import get_cache_manager

import xfused
import xfused.ops.bias_act_dropout as op
import xfused.ops.mask as mask_op
from xfused.ops import _tiles
from xfused.ops._launch import LIMITED

TABLE = Path(__file__).with_name("compile_budget.csv")
COLUMNS = ("instructions", "outside", "registers", "bytes", "spilled")
TABLED = "sm_90"
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
SIZES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}  # of an access, by its modifier; else 4

# The plain call is (8192, 16384) with p = 0.1, bias, a seed that travels with the launch, and origin (0, 0).
VARIANTS = {
    "small": {"m": 128, "n": 512},
    "middle": {"m": 2048, "n": 4096},
    "ragged": {"m": 8191},
    "shard": {"row0": 3, "col0": 5},
    "p0": {"p": 0.0},
    "nobias": {"bias": None},
    "fp32bias": {"bias": torch.float32},
    "deviceseed": {"seed_device": "meta"},
    "n1000": {"n": 1000},
    "n50257": {"m": 4096, "n": 50257},
    "n1": {"n": 1},
    "strided": {"stride": 16384 + 1},
}
MASK_VARIANTS = ("shard", "deviceseed", "n1000", "n1")
FP16 = ("identity", "leaky_relu", "gelu", "tanh")
FP32 = ("identity", "leaky_relu", "gelu", "gelu_tanh", "quick_gelu", "silu", "mish", "elu", "selu", "celu")
FP32 += ("softplus", "sigmoid", "tanh")
NVIDIA = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
AMD = ("gfx942", "gfx950")


def cases(target):
    """The cases held for a target."""
    calls = ["bfloat16/gelu", "float32/gelu"]
    masks = []
    if target == TABLED:
        calls = [f"bfloat16/{name}" for name in xfused.activations()]
        calls += [f"float16/{name}" for name in FP16] + [f"float32/{name}" for name in FP32]
        calls += [f"bfloat16/gelu/{variant}" for variant in VARIANTS]
        masks = [f"mask/bool/none/{variant}" for variant in MASK_VARIANTS]
    return [f"{kernel}/{call}" for call in calls for kernel in ("forward", "backward")] + ["mask/bool/none", *masks]


def recorded(target, case):
    """(kernel, arguments, constants, warps, registers) of the one launch that the launcher makes."""
    kernel, dtype_name, activation, variant = (*case.split("/"), None)[:4]
    call = {"m": 8192, "n": 16384, "p": 0.1, "bias": "same", "seed_device": "cpu", "row0": 0, "col0": 0}
    call |= {"stride": None} | VARIANTS.get(variant, {})
    launches = []

    def launch(kernel, grid, args, constants, num_warps, registers):
        launches.append((kernel, args, constants, num_warps, registers))

    op.launch = mask_op.launch = launch
    for module in (op, mask_op, _tiles):
        module.has_ptx = lambda device: target in NVIDIA
    seed = torch.zeros(2, dtype=torch.int64, device=call["seed_device"])
    m, n, p, origin = call["m"], call["n"], call["p"], (call["row0"], call["col0"])
    if kernel == "mask":
        mask_op.launch_mask(seed, m, n, p, *origin, torch.device("meta"))
    else:
        dtype = getattr(torch, dtype_name)
        stride = call["stride"] or n
        x = torch.empty(m * stride, dtype=dtype, device="meta").as_strided((m, n), (stride, 1))
        bias_type = dtype if call["bias"] == "same" else call["bias"]
        bias = None if bias_type is None else torch.empty(n, dtype=bias_type, device="meta")
        options = (activation, list(xfused.activation(activation).parameters), p, *origin)
        if kernel == "forward":
            op.launch_forward(x, bias, seed, *options)
        else:
            op.launch_backward(x, None if activation == "identity" else x, bias, seed, *options)
    (launch,) = launches
    return launch


def compiled(target, kernel, args, constants, warps, registers):
    signature, constexprs, attributes = {}, {}, {}
    for position, parameter in enumerate(kernel.params):
        name = parameter.name
        if position >= len(args):
            signature[name], constexprs[name] = "constexpr", constants[position - len(args)]
            continue
        value = args[position]
        specialised = isinstance(value, int) and not parameter.do_not_specialize
        if value is None or (specialised and value == 1):
            signature[name], constexprs[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            attributes[(position,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = parameter.annotation_type
            if specialised and value % 16 == 0:
                attributes[(position,)] = [["tt.divisibility", 16]]
    options = {"num_warps": warps, "enable_fp_fusion": True}
    source = ASTSource(kernel, signature, constexprs, attributes)
    if registers and target in NVIDIA and int(target[3:]) // 10 in LIMITED:
        limited = build(target, source, {**options, "maxnreg": registers})
        if not resources(limited)[1]:
            return limited
    return build(target, source, options)


def build(target, source, options):
    gpu = GPUTarget("cuda", int(target[3:]), 32) if target in NVIDIA else GPUTarget("hip", target, 64)
    return compile(source, target=gpu, options=options)


def cuobjdump(kernel, flag):
    """What the tool says of a compiled kernel; it takes half a second, so its words are kept in Triton's cache."""
    cache, name = get_cache_manager(kernel.metadata.hash), f"cuobjdump{flag}"
    if path := cache.get_file(name):
        return Path(path).read_text()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        run = subprocess.run([CUOBJDUMP, flag, file.name], capture_output=True, text=True, check=True)
    cache.put(run.stdout + run.stderr, name, binary=False)
    return run.stdout + run.stderr


def opcode(text):
    return re.sub(r"^@!?U?P\w+\s+", "", text).split()[0]


def size(name):
    """Bytes a thread moves with one memory access."""
    return next((SIZES[part] for part in reversed(name.split(".")) if part in SIZES), 4)


def moved(instructions, *names):
    """Bytes a thread moves with the accesses of these names, each executed once."""
    taken = [opcode(text) for text in instructions if not text.startswith("@!PT")]  # those only wait
    return sum(size(name) for name in taken if name.split(".")[0] in names)


def row_loop(instructions):
    """(body of the loop that writes the rows, instructions outside); the whole where there is no such loop.

    `instructions`: (address, text).
    """
    best = [text for _, text in instructions], []
    most = 0
    for address, text in instructions:
        target = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
        if not target or int(target.group(1), 16) >= address:
            continue
        first = int(target.group(1), 16)
        body = [t for a, t in instructions if first <= a <= address]
        if (stored := moved(body, "STG")) > most or (stored == most > 0 and len(body) < len(best[0])):
            best, most = (body, [t for a, t in instructions if not first <= a <= address]), stored
    return best


def resources(kernel):
    """(registers, bytes of the stack and of local memory) of a thread: the driver calls the latter spills."""
    usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", cuobjdump(kernel, "-res-usage"))
    return int(usage.group(1)), int(usage.group(2)) + int(usage.group(3))


def nvidia_facts(kernel, itemsize):
    """What the disassembly shows, with everything a thread executes an element counted in the loop over rows if any."""
    listing = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", cuobjdump(kernel, "-sass"), re.MULTILINE)
    listing = [(int(address, 16), text) for address, text in listing if opcode(text) != "NOP"]
    registers, local = resources(kernel)
    body, outside = row_loop(listing)
    whole = [text for _, text in listing]
    return {
        "instructions": round(len(body) * itemsize / moved(body, "STG"), 2),
        "outside": len(outside),
        "registers": registers,
        "bytes": min(size(name) for name in map(opcode, body) if name.split(".")[0] in ("LDG", "STG", "LDGSTS")),
        "spilled": local + moved(whole, "LDL", "STL"),
        "shared": kernel.metadata.shared,
        "shared_read": moved(body, "LDS", "LDSM"),
        "shared_written": moved(body, "STS", "STSM"),
        "prefetched": moved(body, "LDGSTS"),
        "looped": bool(outside),
    }


def amd_facts(asm):
    text = asm["amdgcn"]

    def metadata(name):
        return int(re.search(rf"\.{name}:\s*(\d+)", text).group(1))

    widths = {"ubyte": 1, "byte": 1, "ushort": 2, "short": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
    access = r"^\s+(?:global|buffer|flat)_(?:load|store)_(?:lds_)?(u?byte|u?short|dword(?:x\d)?)\b"
    found = [widths[width] for width in re.findall(access, text, re.MULTILINE)]
    return {
        "registers": metadata("vgpr_count"),
        # scalar registers spill to lanes of vector registers, not to memory
        "spilled": metadata("private_segment_fixed_size") + metadata("vgpr_spill_count"),
        "shared": metadata("group_segment_fixed_size"),
        "bytes": max(set(found), key=found.count),  # of most accesses: the sums' few are narrow
        "binary": len(asm["hsaco"]),
    }


def facts(job):
    target, case = job
    kernel, args, constants, warps, registers = recorded(target, case)
    result = compiled(target, kernel, args, constants, warps, registers)
    if target in AMD:
        return amd_facts(result.asm)
    itemsize = 1 if case.startswith("mask") else getattr(torch, case.split("/")[1]).itemsize
    return nvidia_facts(result, itemsize)


@triton.jit
def nothing(pointer):
    tl.store(pointer, 1)


def unknown(target):
    """Why this Triton cannot compile for the target, or None."""
    backend = "nvidia" if target in NVIDIA else "amd"
    if backend not in backends:
        return f"this Triton has no {backend} backend"
    try:
        build(target, ASTSource(nothing, {"pointer": "*i32"}), {})
    except Exception as error:  # each backend raises its own
        return f"this Triton does not compile for {target}: {str(error).strip().splitlines()[0]}"
    return None


def all_facts(targets, names=()):
    """target -> case -> facts, or target -> why it is unknown."""
    reasons = {target: unknown(target) for target in targets}
    jobs = [(t, case) for t in targets if not reasons[t] for case in names or cases(t)]
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        found = dict(zip(jobs, pool.map(facts, jobs, chunksize=1), strict=True))
    return {t: reasons[t] or {case: found[t, case] for u, case in jobs if u == t} for t in targets}


def read_table():
    """case -> column -> number."""
    with TABLE.open(newline="") as file:
        return {row.pop("case"): {column: float(row[column]) for column in COLUMNS} for row in csv.DictReader(file)}


def write_table(rows, old):
    """Each entry is the worse of the two."""
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("case", *COLUMNS))
        for case, row in rows.items():
            values = [(column, row[column], old.get(case, row)[column]) for column in COLUMNS]
            worst = {column: min(pair) if column == "bytes" else max(pair) for column, *pair in values}
            writer.writerow((case, *(f"{worst[column]:g}" for column in COLUMNS)))
            if worst["spilled"]:
                print(f"{case} spills {worst['spilled']:g} bytes", file=sys.stderr)


def main(*args):
    if args and args[0] in ("--write", "--raise"):
        write_table(all_facts([TABLED])[TABLED], read_table() if args[0] == "--raise" else {})
    else:
        targets = args[:1] or (*NVIDIA, *AMD)
        print(json.dumps(all_facts(targets, args[1:])))


if __name__ == "__main__":
    main(*sys.argv[1:])
