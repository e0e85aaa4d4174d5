from evener.session.site import allocator_settings, expandable_segments


def test_the_settings_of_torchs_allocator_hold_in_a_rehearsal():
    assert expandable_segments({"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    assert expandable_segments({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments: True"})
    assert not expandable_segments({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"})
    assert not expandable_segments({})


def test_segments_grow_where_the_driver_can_and_nobody_set_anything():
    found, why = allocator_settings("cuda", {}, nvidia=True, system="linux")
    assert found == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} and expandable_segments(found)
    assert "micro-batches change their size" in why


def test_settings_of_the_users_stay():
    given = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    found, why = allocator_settings("cuda", given, nvidia=True, system="linux")
    assert found == {} and why.endswith("given in PYTORCH_CUDA_ALLOC_CONF")


def test_nothing_is_set_where_it_has_no_meaning():
    for type_, nvidia, system in (("cpu", False, "linux"), ("cuda", False, "linux"), ("cuda", True, "win32")):
        assert allocator_settings(type_, {}, nvidia=nvidia, system=system) == ({}, "")
