"""Measurements of attention, spikes, energy and memory, the theorems, and the report that shows them."""

from lrfdyn.analysis.analyze import analyze, measure_model, sources_for
from lrfdyn.analysis.measure.exits import choose_exit, exit_curve
from lrfdyn.analysis.measure.inference import attention_peak, attention_state, inference_peak
from lrfdyn.analysis.measure.locality import locality, receptive_field, receptive_field_record, share_inside
from lrfdyn.analysis.measure.maps import attention_maps
from lrfdyn.analysis.measure.observe import load_images
from lrfdyn.analysis.measure.recording import follow_recording
from lrfdyn.analysis.measure.spikes import EnergyModel, energy, firing_rates
from lrfdyn.analysis.report.recording import write_recording_page
from lrfdyn.analysis.report.write import render_report, write_all, write_report
from lrfdyn.analysis.theory_report import TheorySettings, theory_results

__all__ = [
    "EnergyModel",
    "TheorySettings",
    "analyze",
    "attention_maps",
    "attention_peak",
    "attention_state",
    "choose_exit",
    "energy",
    "exit_curve",
    "firing_rates",
    "follow_recording",
    "inference_peak",
    "load_images",
    "locality",
    "measure_model",
    "receptive_field",
    "receptive_field_record",
    "render_report",
    "share_inside",
    "sources_for",
    "theory_results",
    "write_all",
    "write_recording_page",
    "write_report",
]
