"""Exported names that the reference omits, because only the layers above use them."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["INTERNAL", "SYSTEM", "names"]


def names(text: str) -> frozenset[str]:
    """Return the names in a text."""
    return frozenset(text.split())


SYSTEM = names(
    "alive expect measure observers open open_in opened_at opening sender start_device thread token"
)
# What the layers above use and a program does not: names of a module, or of members of a class.
INTERNAL: Mapping[str, frozenset[str]] = {
    "trio_accel.backends": names(
        "candidates describe driver_checks members path_of resolve resolve_for_worker"
    ),
    "trio_accel.actors": names(
        "DirectReply Measured Meter UNAVAILABLE Posted WAKE_VALUE Waiter actor_path_of around_each_system "
        "arguments_of bind_arguments binder check_name describe idle_actor message_target named_arguments "
        "NotAwaited Opening Silenced not_copied opens silence unobserved_actor "
        "as_plain checked_options copied fits is_number validator must_be_count must_be_number "
        "must_be_one_of must_be_positive must_be_whole leaves named_options nearest "
        "note_end fast_path running_beside signed_like single unknown_option warn_untold ActorFigures "
        "ItemRequest Leavable ParkingLot Serves TaskEvent TaskLock Validator to_await apart leavable_context "
        "run_all run_apart run_in_thread"
    ),
    "trio_accel.devices": names(
        "Around Ask CompletionPort ContextActor DeviceActor DeviceOpening EngineHook Fault FaultHow "
        "FaultKind FaultPlan Key Launch LaunchTimes MemoryActor OpenDevice Phase PutFirst PutPart Recorded "
        "Lent Stay poll_answers PeerCopy PeerCopyActor available exclusive copy_error by_key by_load "
        "for_blocking_code IS_DERIVED "
        "check_device describe_workers is_traced lend opened overlaps record refuse_recording run_together "
        "DECLARED operation_like Chain ArrayFunction arguments_of called composed refuse_value "
        "bounded_integer bounded_integers clamped integer is_several real refuse_dtypes said shown what_to_do"
    ),
    "trio_accel.programs": names("ProgramActor"),
    "trio_accel.train": names("grad value_and_grad"),  # of `gradients`
    "trio_accel.backends.base": names(
        "BackendReport BlockMemory ChunkAllocator ChunkSource CopyFromForeignSpec DeviceReport ForeignArray "
        "StreamPause Lease PlacedBlock Placement Poison SharesCudaMemory Software as_bits scalar Refused "
        "ALWAYS_HELD by_way_of_int64 check_conversion check_plain check_same_kind element factor "
        "host_array is_same_kind ArraySpec OperationSpec INEXACT INTEGERS NATIVE check_dtype "
        "check_structure misplaced no_element no_length scalar_of unordered function_of name_function "
        "operation_of"
    ),
    "trio_accel.backends.base.contract.ops": names(
        "Asker ProgramCall ProgramFetch ProgramNext ProgramResult ProgramReturn RESULT_WORDS "
        "BranchSpec ChainSpec GraphNode GraphRecipe GraphSpec LoopSpec graph_recipe "
        "Descriptor Role SpecField array_key arrays_of field_repr map_arrays value_key "
        "common_shape product_shape real_of transformed_shape KINDS check_index Item Shapes column "
        "complex_of scalar_offsets IDENTITIES Combination Scan identity_of accumulator_of number_of "
        "contraction_terms in_between"
    ),
    "AccelRef": names("first noun refuse refuse_numpy silence"),
    "ActorContext": names("served show show_note show_process"),
    "ActorSystem": SYSTEM,
    "AdaptiveCompletion": names("open"),
    "Call": names("args close first function named noun refuse refuse_numpy send silence throw"),
    "CompletionStrategy": names("open"),
    "DeviceGroup": names("add scope"),
    "DeferredReply": names("fail_as_crash is_of poll_once_more"),
    "Device": names(
        "ask_chain check_ask check_pending descriptors end fate_of_arrays take_back is_given_up look_ahead "
        "lost start validated wait_ended"
    ),
    "HostCallbackCompletion": names("open"),
    "Kernel": names("definition plan"),
    "LibraryActor": names("launch launch_here launch_now library_of lifespan start_grace"),
    "ManualCompletion": names("open"),
    "OperationSpec": names("blocks descriptor"),
    "Pending": names("settle what_to_do"),
    "PerActorStreams": names("open"),
    "PerLibraryStreams": names("open"),
    "Planner": names("launch"),
    "PolledCompletion": names("open"),
    "Probe": names("answer"),
    "Recorder": names("begin end"),
    "Ref": names("post"),
    "SingleStream": names("open"),
    "StreamPool": names("open"),
    "Subscription": names("deliver"),
    "SyncCompletion": names("open"),
    "System": SYSTEM,
}
