"""One HTML file that shows a run, or compares several: `mrl report`."""

from mrl.report.page import report_finished as report_finished
from mrl.report.page import write_report as write_report
