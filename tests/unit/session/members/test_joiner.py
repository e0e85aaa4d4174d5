from evener.session.members.joiner import free_name


def test_a_name_that_the_job_has_gets_a_number():
    assert free_name("lab/cpu", ["lab/gpu0"]) == "lab/cpu"
    assert free_name("lab/cpu", ["lab/cpu", "lab/cpu-2"]) == "lab/cpu-3"
