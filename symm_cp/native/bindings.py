"""The C functions of csrc/c_api.cpp: their results and arguments as ctypes sees them."""

from __future__ import annotations

import ctypes

from symm_cp.native import wire

VOID, INT, LONG, TEXT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_char_p
_EPOCH, _LAYOUT = ctypes.c_uint32, ctypes.POINTER(wire.WorkspaceLayout)
#: Takes the name of a group; see csrc/channel/groups.h.
FindGroup = ctypes.CFUNCTYPE(INT, TEXT, INT)
NoteCall = ctypes.CFUNCTYPE(None, TEXT)
SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "symm_cp_error": (TEXT, []),
    "symm_cp_wire": (TEXT, []),
    "symm_cp_group_open": (VOID, [TEXT, INT, INT, LONG, LONG]),
    "symm_cp_group_close": (None, [VOID]),
    "symm_cp_release_groups": (None, []),
    "symm_cp_begin": (LONG, [VOID, LONG, TEXT]),
    "symm_cp_fail": (None, [VOID, TEXT]),
    "symm_cp_refuse": (None, [VOID, INT, TEXT]),
    "symm_cp_reserve": (LONG, [VOID, INT, LONG]),
    "symm_cp_set_timeout": (None, [VOID, LONG]),
    "symm_cp_slot_bytes": (LONG, [VOID, INT]),
    "symm_cp_workspace_bytes": (LONG, [VOID, INT]),
    "symm_cp_epoch": (LONG, [VOID, INT]),
    "symm_cp_skip": (None, [VOID, INT, LONG]),
    "symm_cp_move": (None, [VOID, INT, LONG]),
    "symm_cp_run": (LONG, [VOID, VOID, INT, VOID, VOID]),
    "symm_cp_exchange_boxes": (
        LONG,
        [VOID, TEXT, VOID, LONG, VOID, LONG, INT, VOID, INT],
    ),
    "symm_cp_set_loop": (
        None,
        [VOID, INT, INT, INT, VOID, INT, VOID, INT, INT, INT, INT],
    ),
    "symm_cp_exchange": (
        LONG,
        [VOID, *[INT] * 3, TEXT, VOID, VOID, INT, VOID, VOID, INT, INT, INT],
    ),
    "symm_cp_set_on_one_host": (None, [VOID, INT]),
    "symm_cp_lock": (LONG, [VOID]),
    "symm_cp_unlock": (None, [VOID]),
    "symm_cp_explain": (None, [TEXT]),
    "symm_cp_explain_interruption": (None, [VOID, ctypes.py_object]),
    "symm_cp_group_known": (None, [VOID]),
    "symm_cp_on_unknown_group": (None, [FindGroup]),
    "symm_cp_shard": (VOID, [VOID, INT]),
    "symm_cp_slot": (VOID, [VOID]),
    "symm_cp_met_on_this_host": (INT, [TEXT]),
    "symm_cp_probe_links": (VOID, [TEXT]),
    "symm_cp_link_lost": (INT, [VOID, INT]),
    "symm_cp_links_close": (None, [VOID]),
    "symm_cp_group_timeout_ms": (LONG, [TEXT]),
    "symm_cp_attention_runs": (LONG, []),
    "symm_cp_interruption_was_told": (INT, []),
    "symm_cp_was_told": (ctypes.c_int, [ctypes.c_char_p]),
    "symm_cp_serve_cpu": (None, [INT]),
    "symm_cp_serve_few_rows": (None, [INT]),
    "symm_cp_serve_few_tokens": (None, [INT]),
    "symm_cp_on_small_matmul": (None, [NoteCall]),
    "symm_cp_keep_results": (None, [LONG]),
    "symm_cp_empty_cache": (LONG, []),
    "symm_cp_result_memory": (None, [ctypes.POINTER(LONG)]),
    "symm_cp_reduce": (LONG, [VOID, VOID, INT, LONG, INT, INT, INT]),
    "symm_cp_reducible": (INT, [INT, INT]),
    "symm_cp_copy": (None, [VOID, VOID, LONG, INT]),
    "symm_cp_slot_stores": (None, [VOID, VOID, LONG, VOID]),
    "symm_cp_is_symmetric": (INT, [VOID, TEXT]),
    "symm_cp_rendezvous_begun": (LONG, [TEXT]),
    "symm_cp_record": (None, [INT]),
    "symm_cp_recorded": (ctypes.POINTER(wire.TraceEvent), [ctypes.POINTER(LONG)]),
    "symm_cp_recorded_free": (None, [ctypes.POINTER(wire.TraceEvent)]),
    "symm_cp_probe_begin": (None, [ctypes.c_uint64, LONG, LONG]),
    "symm_cp_probe_end": (LONG, []),
    "symm_cp_probe_step": (None, []),
    "symm_cp_set_pauses": (None, [ctypes.c_uint64, LONG]),
    "symm_cp_driver": (LONG, [TEXT]),
    "symm_cp_driver_version": (LONG, [TEXT]),
    "symm_cp_stream_signals_version": (INT, []),
    "symm_cp_streams_open": (
        VOID,
        [TEXT, VOID, INT, INT, _LAYOUT, INT, INT, TEXT, LONG, VOID],
    ),
    "symm_cp_streams_close": (None, [VOID]),
    "symm_cp_streams_run": (LONG, [VOID, VOID, INT, VOID, VOID, _EPOCH, INT, TEXT]),
    "symm_cp_streams_expect": (None, [VOID, INT, INT, _EPOCH, _EPOCH, TEXT]),
    "symm_cp_streams_give_up": (LONG, [VOID]),
    "symm_cp_streams_ended": (LONG, [VOID]),
    "symm_cp_streams_set_single_copies": (None, [VOID, INT]),
    "symm_cp_context": (VOID, [TEXT]),
    "symm_cp_set_context": (LONG, [TEXT, VOID]),
    "symm_cp_stream_open": (VOID, [TEXT]),
    "symm_cp_stream_ended": (LONG, [TEXT, VOID]),
    "symm_cp_capture_id": (LONG, [TEXT, VOID]),
    "symm_cp_watch_stop": (None, []),
}
