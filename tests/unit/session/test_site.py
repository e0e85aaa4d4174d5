from evener.session.site import expandable_segments


def test_the_settings_of_torchs_allocator_hold_in_a_rehearsal():
    assert expandable_segments({"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    assert expandable_segments({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments: True"})
    assert not expandable_segments({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"})
    assert not expandable_segments({})
