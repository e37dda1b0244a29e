"""The command `dsv41 analyze`."""

import csv
import io
import json
import sys
from pathlib import Path

from dsv41.analyze import contexts, figures, report
from dsv41.analyze.others import OTHERS
from dsv41.analyze.own import own_model
from dsv41.analyze.report import Report, Subject
from dsv41.commands import Analyze
from dsv41.config import PRESETS, ModelConfig, config_file, load_config, preset
from dsv41.errors import UserError, escaped, nearest
from dsv41.files import check_outputs, write_text
from dsv41.show import print_table

_COMPARED = ("flash", "v4-flash", "v3.2", "v1")
_BY_CONTEXT = {"flops": report.flops, "prefill": report.prefill, "memory": report.memory}
_PLAIN = {"kv": report.kv, "params": report.params}


def subject(name: str) -> Subject:
    """A named model: a preset of this code, or one that it is compared with."""
    if name in OTHERS:
        return Subject(OTHERS[name]())
    if name not in PRESETS:
        names = (*PRESETS, *OTHERS)
        raise UserError(f"preset: found {name!r}, allowed are {', '.join(names)}{nearest(name, names)}")
    return _own(preset(name), name, {"flash": "V4.1-Flash"}.get(name, name))


def _own(config: ModelConfig, name: str, title: str) -> Subject:
    return Subject(own_model(config, name, title), config)


def _subjects(options: Analyze) -> list[Subject]:
    if options.config is not None:
        if options.preset is not None:
            raise UserError("config: found beside --preset, allowed is one of them")
        return [_own(load_config(options.config), name := escaped(str(options.config)).replace("\n", "\\n"), name)]
    return [subject(name) for name in ((options.preset,) if options.preset is not None else _COMPARED)]


def analyze(options: Analyze) -> int:
    """Prints the report and writes what was asked for; 1 where a formula and a count differ. `UserError` before any work."""
    if options.contexts is not None and options.what in _PLAIN:
        raise UserError(f"contexts: found with {options.what}, allowed with {', '.join(_BY_CONTEXT)}")
    if options.plot is not None:
        figures.check_plot(options.plot)
    elif options.theme is not None:
        raise UserError("theme: found without --plot, allowed is beside it")
    check_outputs({"csv": options.csv, "plot": options.plot}, () if options.config is None else (config_file(options.config),))
    lengths = contexts.parse_contexts(options.contexts) if options.contexts is not None else None
    subjects = _subjects(options)
    if lengths is None:
        own = subjects[0].config
        lengths = contexts.usual_contexts(own.max_position_embeddings if own is not None else 1 << 20)
    what = options.what
    found = _BY_CONTEXT[what](subjects, lengths) if what in _BY_CONTEXT else _PLAIN[what](subjects)
    if options.csv is not None:
        _write_csv(found, options.csv)
    if options.plot is not None:
        figures.plot(what, [s.model for s in subjects], lengths, options.theme or "light", options.plot)
    if options.json:
        print(json.dumps(found.rows, indent=1))
    else:
        _show(found)
    for line in found.disagreements:
        print(f"disagree: {line}", file=sys.stderr)
    return 1 if found.disagreements else 0


def _show(found: Report) -> None:
    print_table(found.columns, [(cells, None) for cells in found.cells], found.title, found.columns[1:])
    for note in found.notes:
        print(note)


def _write_csv(found: Report, file: Path) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(found.rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(found.rows)
    write_text(file, text.getvalue())
