"""Who is in the job, from one generation to the next.

roll      the survivors tell their standing; one of them says how the job goes on
handover  state goes to who is to hold it and does not
copies    devices keep each other's state where no other device holds it
"""
