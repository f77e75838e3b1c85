"""Where the paper disagrees with itself, found in its own figures."""

from wbmm.bench.seg import paper_speeds
from wbmm.config_files import resolve_config
from wbmm.paper_tables import Row, Table, get_table, load_dense_tables, load_tables

__all__ = ["contradictions", "dense_contradictions"]

SAME = {"top1": "Top-1", "miou": "mIoU"}


def _net(table: Table, row: Row) -> str | None:
    """The name of the row's net, the same for the same net; None where it has no recipe of its own."""
    return resolve_config(f"table:{table.name}/{row.id}")[1]["out"] if row.recipe and not row.large_kernel else None


def contradictions(name: str) -> list[str]:
    """The same net with other figures elsewhere, and claims that a table's figures do not bear out."""
    if name not in load_tables():
        return []
    return [*_same_nets(name), *_memory(name), *_consistent(name)]


def _same_nets(name: str) -> list[str]:
    table, found = get_table(name), []
    others = [(other, row) for other in load_tables().values() for row in other.rows if other.recipe_changes == {}]
    for row in table.rows:
        net = _net(table, row)
        for key, label in SAME.items():
            if net is None or key not in row.paper:
                continue
            places = {
                f"{other.name}/{twin.id}": twin.paper[key]
                for other, twin in others
                if key in twin.paper and (other.name, twin.id) != (name, row.id) and _net(other, twin) == net
            }
            places = {where: value for where, value in places.items() if _differ(value, row.paper[key])}
            if places:
                listed = ", ".join(f"{value} in `{where}`" for where, value in places.items())
                found.append(f"`{row.id}` has {label} {row.paper[key]} here and, for the same net, {listed}.")
    return found


def _differ(one: object, other: object) -> bool:
    """Whether two printed figures differ by more than the rounding of the one with fewer digits."""
    digits = min(len(str(value).partition(".")[2]) for value in (one, other))
    return abs(float(one) - float(other)) > 0.5 * 10**-digits + 1e-9


def _memory(name: str) -> list[str]:
    if name != "cross-operator":
        return []
    ours, large = (get_table(name).row(row).paper["memory"] for row in ("wbmm", "dw13"))
    if ours <= large:
        return []
    return [f"The text says that w = 7 takes less memory than 13x13; the table has {ours} against {large} GB."]


def _consistent(name: str) -> list[str]:
    if name != "windows":
        return []
    speeds, found = paper_speeds(), []
    for (size, backbone, height, width, batch), speed in speeds.items():
        ratio = speed / speeds[size, "unireplknet", height, width, batch]
        if backbone == "hier" and ratio < 1:
            found.append(f"{ratio:.3f}x for {size.upper()} at {height}x{width}, batch {batch}")
    text = (
        "The text says that hierarchical windows are consistently faster than UniRepLKNet in segmentors; its table has"
    )
    return [f"{text} {' and '.join(found)}."] if found else []


def dense_contradictions() -> list[str]:
    """What the table of ADE20K prints for nets of other tables."""
    printed = {row.id: row.paper["miou"] for row in load_dense_tables()["ade20k"].rows}
    pairs = {"7x7-t": ("windows", "w7"), "hier-t": ("windows", "hier")}
    return [
        f"`{here}` has mIoU {printed[here]} here and {get_table(table).row(row).paper['miou']} in `{table}/{row}`."
        for here, (table, row) in pairs.items()
        if _differ(printed[here], get_table(table).row(row).paper["miou"])
    ]
