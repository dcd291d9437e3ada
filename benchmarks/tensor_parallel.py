"""One training step of FusedMLP under tensor and sequence parallelism, checked against one device and timed.

    python -m benchmarks.tensor_parallel --csv tensor_parallel.csv
    torchrun --nproc-per-node 2 -m benchmarks.tensor_parallel --csv tensor_parallel.csv

Runs on any number of GPUs (NCCL), on one, and on CPU processes (gloo). fc1 is sharded by columns, fc2 by rows, and what
is around them along the sequence: by itself, and with FSDP2 in a mesh of data and tensor parallelism. Checked: the mask
is bit for bit that of one device; loss and gradients agree with one device within the dtype's tolerance; replicas draw
different masks. Timed, in turns: the same model from torch.nn with PyTorch's own dropout. The exit status is 1 if a
check fails.
"""

import argparse
import copy
import csv
import dataclasses
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import xfused
from xfused.sharding import draw_seed

TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}  # of the gradients' norms; sums are split otherwise
SEED = 1234


@dataclasses.dataclass
class Row:
    """One arrangement; the same on every rank: errors are the largest of any rank, times those of the slowest."""

    arrangement: str
    dp: int
    tp: int
    dtype: str
    batch: int
    sequence: int
    width: int
    hidden: int
    p: float
    mask_is_equal: bool
    replicas_differ: bool
    loss_error: float
    gradient_error: float
    milliseconds_xfused: float
    milliseconds_torch_nn: float
    ratio: float
    repeats: int
    backend: str
    device: str
    torch: str

    def failures(self) -> list[str]:
        bound = TOLERANCE[self.dtype]
        found = {
            "mask": not self.mask_is_equal,
            "replicas": not self.replicas_differ,
            "loss": not self.loss_error <= bound,
            "gradients": not self.gradient_error <= bound,
        }
        return [name for name, failed in found.items() if failed]


class TorchMLP(nn.Module):
    """The same layers from torch.nn."""

    def __init__(self, width: int, hidden: int, p: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = nn.GELU()
        self.drop = nn.Dropout(p)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.drop(self.act(self.fc1(x))))


def shard(model: nn.Module, dp: DeviceMesh | None, tp: DeviceMesh, dtype: torch.dtype) -> nn.Module:
    """A copy of the model (fp32) in this arrangement; its input and output are shards of the sequence."""
    model = copy.deepcopy(model)
    plan = {"fc1": ColwiseParallel(input_layouts=Shard(1)), "fc2": RowwiseParallel(output_layouts=Shard(1))}
    if dp is None:
        return parallelize_module(model.to(dtype), tp, plan)
    parallelize_module(model, tp, plan)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    fully_shard(model, mesh=dp, mp_policy=policy)
    return model


def on_one_device(
    model: xfused.FusedMLP, x: Tensor, seed: Tensor, dtype: torch.dtype
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Loss, gradients and mask of this replica's batch x (batch, sequence, width)."""
    low = copy.deepcopy(model).to(dtype)
    h = nn.functional.linear(x, low.fc1.weight)
    h = xfused.bias_act_dropout(h, low.fc1.bias, activation=low.activation, p=low.dropout, seed=seed)
    loss = low.fc2(h).float().square().mean()
    loss.backward()
    gradients = {
        name: parameter.grad.float() for name, parameter in low.named_parameters() if parameter.grad is not None
    }
    return loss.detach(), gradients, xfused.dropout_mask(h.shape, low.dropout, seed, device=x.device)


@torch.no_grad()
def mask_of(sharded: nn.Module, x: Tensor) -> Tensor:
    """What the dropout keeps of this rank's hidden features, with 100 for fc1's output, which could be 0 by itself."""
    fc1, fc2 = sharded.get_submodule("fc1"), sharded.get_submodule("fc2")
    kept: list[Tensor] = []
    hooks = [
        fc1.register_forward_hook(lambda module, args, output: torch.full_like(output, 100)),
        fc2.register_forward_pre_hook(lambda module, args: kept.append(args[0] != 0), prepend=True),
    ]
    sharded(x).sum()  # waits for the reduction
    for hook in hooks:
        hook.remove()
    return kept[0]


def step(model: nn.Module, x: Tensor, shards: int) -> Tensor:
    """This rank's part of the loss, after its backward."""
    loss = model(x).float().square().mean() / shards
    loss.backward()
    return loss.detach()


def largest(value: float, device: torch.device) -> float:
    """Over all ranks; NaN if one is."""
    values = [torch.zeros(1, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(values, torch.tensor([value], device=device))
    return float(torch.stack(values).max())


def timed(models: dict[str, nn.Module], x: Tensor, shards: int, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of a step on the slowest rank, the models taking turns."""
    cuda = x.device.type == "cuda"
    inner = 10 if cuda else 1
    synchronize: Callable[[], None] = torch.cuda.synchronize if cuda else lambda: None
    times: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(repeats + 1):
        for name, model in models.items():
            dist.barrier()
            synchronize()
            start = time.perf_counter()
            for _ in range(inner):
                step(model, x, shards)
                model.zero_grad()
            synchronize()
            elapsed = largest((time.perf_counter() - start) / inner * 1e3, x.device)
            if turn > 0:  # the first one warms up
                times[name].append(elapsed)
    return times


def measure(dp: int, tp: int, fsdp: bool, options: argparse.Namespace, device: torch.device) -> Row:
    """Checks and times one arrangement; every rank calls it."""
    dtype = getattr(torch, options.dtype)
    mesh = init_device_mesh(device.type, (dp, tp) if fsdp else (tp,), mesh_dim_names=("dp", "tp") if fsdp else ("tp",))
    dp_mesh, tp_mesh = mesh["dp"] if fsdp else None, mesh["tp"] if fsdp else mesh
    replica, part = dp_mesh.get_local_rank() if dp_mesh else 0, tp_mesh.get_local_rank()
    torch.manual_seed(SEED)
    model = xfused.FusedMLP(options.width, options.hidden, dropout=options.p).to(device)
    model_nn = TorchMLP(options.width, options.hidden, options.p).to(device)
    shape = dp, options.batch, options.sequence, options.width
    x = torch.randn(shape, generator=torch.Generator().manual_seed(SEED))[replica].to(device, dtype)
    x_part = x.chunk(tp, dim=1)[part].contiguous()
    sharded = shard(model, dp_mesh, tp_mesh, dtype)

    torch.manual_seed(SEED)  # all ranks alike: what tells replicas apart is the mesh
    seed = draw_seed(tp_mesh, device)
    torch.manual_seed(SEED)
    first = xfused.new_seed(device)  # what one device would draw
    seed_is_equal = replica != 0 or torch.equal(seed.to(device), first)
    loss, gradients, mask = on_one_device(model, x, seed, dtype)

    torch.manual_seed(SEED)
    mask_is_equal = seed_is_equal and torch.equal(mask_of(sharded, x_part), mask.chunk(tp, dim=-1)[part])
    torch.manual_seed(SEED)
    sharded_loss = step(sharded, x_part, tp)
    dist.all_reduce(sharded_loss, group=tp_mesh.get_group())
    loss_error = float((sharded_loss - loss).abs() / loss)

    gradient_error = 0.0
    replicas_differ = True
    for name, parameter in sharded.named_parameters():
        want, got = gradients[name], parameter.grad
        assert got is not None
        if dp_mesh is not None:
            dist.all_reduce(want, group=dp_mesh.get_group())
        want = want / dp
        got = got.full_tensor() if isinstance(got, DTensor) else got
        error = float((got.float() - want).norm() / want.norm())
        gradient_error = max(gradient_error, error) if error == error else float("nan")
    if dp_mesh is not None:
        masks = [torch.empty_like(mask) for _ in range(dp)]
        dist.all_gather(masks, mask.contiguous(), group=dp_mesh.get_group())
        chance = options.p**2 + (1 - options.p) ** 2  # that two independent masks agree on an element
        for other in masks[:replica]:
            agree = float((other == mask).double().mean())
            replicas_differ &= abs(agree - chance) <= 6 * (chance * (1 - chance) / mask.numel()) ** 0.5

    sharded.zero_grad()
    models = {"xfused": sharded, "torch.nn": shard(model_nn, dp_mesh, tp_mesh, dtype)}
    times = {name: statistics.median(ms) for name, ms in timed(models, x_part, tp, options.repeats).items()}
    return Row(
        "FSDP2, tensor and sequence parallel" if fsdp else "tensor and sequence parallel",
        dp, tp, options.dtype, options.batch, options.sequence, options.width, options.hidden, options.p,
        largest(float(not mask_is_equal), device) == 0,
        largest(float(not replicas_differ), device) == 0,
        largest(loss_error, device),
        largest(gradient_error, device),
        times["xfused"], times["torch.nn"], times["xfused"] / times["torch.nn"], options.repeats,
        dist.get_backend(), torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", torch.__version__,
    )  # fmt: skip


def arrangements(world: int) -> list[tuple[int, int, bool]]:
    """(data-parallel size, tensor-parallel size, whether under FSDP2) for this number of ranks."""
    grids = {1: [(1, 1)], 2: [(2, 1), (1, 2)]}.get(world)
    if grids is None:
        grids = [(2, world // 2)] if world % 2 == 0 else [(1, world)]
    return [(1, world, False), *((dp, tp, True) for dp, tp in grids)]


def report(rows: list[Row], options: argparse.Namespace) -> int:
    if options.csv:
        with open(options.csv, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Row)])
            writer.writeheader()
            writer.writerows(dataclasses.asdict(row) for row in rows)
    first = rows[0]
    print(
        f"FusedMLP ({first.batch}, {first.sequence}, {first.width}), hidden {first.hidden}, {first.dtype}, "
        f"p = {first.p}; {first.dp * first.tp} x {first.device}, {first.backend}, torch {first.torch}"
    )
    print(f"{'':38}dp tp  mask    loss error  gradient error  xfused ms  torch.nn ms  ratio")
    for row in rows:
        print(
            f"{row.arrangement:38}{row.dp:2} {row.tp:2}  {'equal' if row.mask_is_equal else 'UNLIKE':6}  "
            f"{row.loss_error:10.1e}  {row.gradient_error:14.1e}  {row.milliseconds_xfused:9.3f}  "
            f"{row.milliseconds_torch_nn:11.3f}  {row.ratio:.3f}"
        )
    print(f"bounds of the errors: {TOLERANCE[first.dtype]:.0e}. Times: medians of {first.repeats} on the slowest rank")
    failures = [f"{row.arrangement} (dp {row.dp}, tp {row.tp}): {name}" for row in rows for name in row.failures()]
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0


def worker(rank: int, world: int, store: str | None, options: argparse.Namespace) -> int:
    """One rank; `store` is a file for processes that were spawned here, None under torchrun."""
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        rank=rank,
        world_size=world,
        store=dist.FileStore(store, world) if store else None,
        timeout=timedelta(minutes=5),
        device_id=device if device.type == "cuda" else None,
    )
    rows = [measure(dp, tp, fsdp, options, device) for dp, tp, fsdp in arrangements(world)]
    status = report(rows, options) if rank == 0 else int(any(row.failures() for row in rows))
    dist.destroy_process_group()
    return status


def leave(status: int) -> NoReturn:
    """Ends the process without Python's finalization: gloo's threads, which may still free a tensor, abort in it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def spawned(rank: int, world: int, store: str, options: argparse.Namespace) -> None:
    leave(worker(rank, world, store, options))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tensor_parallel", description=(__doc__ or "").split("\n")[0]
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if cuda else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--processes", type=int, help="without torchrun; default: one a GPU, two on the CPU")
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32", choices=TOLERANCE)
    parser.add_argument("--batch", type=int, default=4 if cuda else 2, help="of a replica")
    parser.add_argument("--sequence", type=int, default=2048 if cuda else 64)
    parser.add_argument("--width", type=int, default=4096 if cuda else 64)
    parser.add_argument("--hidden", type=int, help="default: four times the width")
    parser.add_argument("--p", type=float, default=0.1)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--csv", help="file that the rows are written to")
    options = parser.parse_args()
    options.hidden = 4 * options.width if options.hidden is None else options.hidden
    torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    default = torch.cuda.device_count() if options.device == "cuda" else 2
    world = int(os.environ["WORLD_SIZE"]) if torchrun else options.processes or default
    if options.sequence % world or options.hidden % world:
        parser.error(f"--sequence and --hidden: got {options.sequence} and {options.hidden}, take multiples of {world}")
    if not 0 < options.p < 1:
        parser.error(f"--p: got {options.p}, takes a number between 0 and 1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast needs rights that a container may lack
    if torchrun:
        leave(worker(int(os.environ["RANK"]), world, None, options))
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        if world == 1:
            return worker(0, 1, store, options)
        try:
            mp.spawn(spawned, (world, store, options), nprocs=world)
        except mp.ProcessExitedException as error:
            return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
