"""The rehearsal: a tiny network by the runtime's own steps, which leaves no trace."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from terrazzo.graph.export import export
from terrazzo.measure.rehearsal import Rehearsal, tiny_graph, tiny_model
from terrazzo.records import Graph
from terrazzo.runtime.links import Links

DEVICES = 3


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).square().mean()


def outline(graph: Graph) -> list[tuple[str, tuple[int, ...]]]:
    """Operators and what they make, without counters of batches, which take no time."""
    return [
        (node.op, graph.shape(node.output))
        for node in graph.nodes
        if graph.values[node.output].is_floating
    ]


def test_the_graph_is_what_exporting_would_give() -> None:
    written = tiny_graph(2, DEVICES)
    exported = export(WithLoss(tiny_model(2)), (torch.zeros(written.shape("x")),)).graph
    assert outline(written) == outline(exported)
    weights = {value.target for value in written.values.values() if value.kind == "parameter"}
    assert weights == {name for name, _ in tiny_model(2).named_parameters()}


def test_alone_there_are_operators_weights_and_calls_and_no_messages() -> None:
    own = Rehearsal(Links()).measure(0.0)
    assert set(own.steps_s) == {"Compute", "Operator"}
    assert 0 < own.net_s < 1 and 0 <= own.weight_s < own.net_s


def test_random_numbers_of_a_script_stay_as_they_were() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    Rehearsal(Links()).measure(0.0)
    assert torch.equal(torch.rand(3), expected)
