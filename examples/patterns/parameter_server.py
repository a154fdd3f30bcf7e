"""A parameter server by hand: rank 0 keeps the parameters, the others ask for them and send gradients.

torchrun --nproc-per-node=3 examples/patterns/parameter_server.py [--backend gloo]
"""

import argparse

import torch
import torch.distributed as dist

ROUNDS, SIZE = 15, 25


def serve(workers: int) -> torch.Tensor:
    """Collect one gradient of each worker, in the order in which they come; send the new parameters to all."""
    parameters = torch.zeros(SIZE)
    for _ in range(ROUNDS):
        for worker in range(1, workers + 1):
            dist.send(parameters, dst=worker)
        gradients = torch.zeros(workers, SIZE)
        for _ in range(workers):
            gradient = torch.zeros(SIZE)
            sender = dist.recv(gradient)  # from anyone
            gradients[sender - 1] = gradient
        parameters -= 0.3 * gradients.mean(0)
    return parameters


def work(truth: torch.Tensor) -> None:
    """Linear regression on data of this worker's own."""
    draw = torch.Generator().manual_seed(dist.get_rank())
    parameters = torch.zeros(SIZE)
    for _ in range(ROUNDS):
        dist.recv(parameters, src=0)
        inputs = torch.randn(64, SIZE, generator=draw)
        errors = inputs @ parameters - inputs @ truth
        dist.isend(inputs.T @ errors / len(inputs), dst=0).wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="iroh")
    dist.init_process_group(parser.parse_args().backend)
    truth = torch.linspace(-1, 1, SIZE)
    if dist.get_rank() == 0:
        found = serve(dist.get_world_size() - 1)
        print(f"loss {(found - truth).square().mean():.6f}")
    else:
        work(truth)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
