"""A comparison as one page that a supervisor can read: question, conclusion, curves, tables, costs, sources."""

from mlsm.evaluation.comparison.report.facts import Part as Part
from mlsm.evaluation.comparison.report.facts import StudyFacts as StudyFacts
from mlsm.evaluation.comparison.report.page import write_report as write_report
