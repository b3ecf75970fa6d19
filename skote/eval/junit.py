"""junit.xml: a run's checks as the test results that CI systems read."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

from skote.types import ExitCode


def junit_xml(manifest: dict[str, Any], metrics: dict[str, Any]) -> str:
    """One test case a check, and one that says whether the run itself is valid and came to its end."""
    cases = [_run_case(metrics), *(_check_case(check) for check in metrics["checks"])]
    suite = ElementTree.Element(
        "testsuite",
        name=f"skotergy {manifest['config']['check']['name']}",
        tests=str(len(cases)),
        failures=str(sum(case.find("failure") is not None for case in cases)),
        errors=str(sum(case.find("error") is not None for case in cases)),
        skipped=str(sum(case.find("skipped") is not None for case in cases)),
        timestamp=manifest["started"],
    )
    suite.extend(cases)
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _case(name: str) -> ElementTree.Element:
    return ElementTree.Element("testcase", classname="skotergy", name=name)


def _run_case(metrics: dict[str, Any]) -> ElementTree.Element:
    case = _case("run")
    invalid = [finding["sentence"] for finding in metrics["findings"] if finding["severity"] == "invalid"]
    if invalid:
        ElementTree.SubElement(case, "error", type="INVALID", message=" ".join(invalid))
    elif metrics["status"] != "complete":
        ElementTree.SubElement(case, "error", type="FAILED", message=f"The run is {metrics['status']}.")
    elif metrics["exit_code"] == ExitCode.FAILED and not any(c["outcome"] == "failed" for c in metrics["checks"]):
        ElementTree.SubElement(case, "error", type="FAILED", message="Requests failed.")
    return case


def _check_case(check: dict[str, Any]) -> ElementTree.Element:
    """A check that is inconclusive is an error: neither passed nor found wanting."""
    case = _case(check["name"])
    tag = {"failed": "failure", "inconclusive": "error", "skipped": "skipped"}.get(check["outcome"])
    if tag is not None:
        ElementTree.SubElement(case, tag, type=check["outcome"].upper(), message=check["sentence"])
    return case
